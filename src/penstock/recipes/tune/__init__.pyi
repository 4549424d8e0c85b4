from penstock.recipes.tune.search import tune as tune
from penstock.recipes.tune.storage import StorageLook as StorageLook
from penstock.recipes.tune.storage import look_at_storage as look_at_storage
from penstock.recipes.tune.tuning import Tuning as Tuning
