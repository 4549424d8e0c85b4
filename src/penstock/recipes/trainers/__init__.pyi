from penstock.recipes.trainers.accelerate import prepare_loader as prepare_loader
from penstock.recipes.trainers.config import build_from_config as build_from_config
from penstock.recipes.trainers.lightning import ChunkProgress as ChunkProgress
from penstock.recipes.trainers.lightning import PenstockDataModule as PenstockDataModule
