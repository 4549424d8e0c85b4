from penstock.recipes.mixture.mixture import Mixture as Mixture
