from penstock.recipes.tune.search import tune as tune
from penstock.recipes.tune.tuning import Tuning as Tuning
