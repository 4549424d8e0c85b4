"""Items from files, one each: those that a table names, or those of a folder."""
