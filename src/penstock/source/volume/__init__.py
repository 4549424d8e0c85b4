"""Items from multiscale volumes: patches around the points of a grid."""
