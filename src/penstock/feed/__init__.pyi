from penstock.feed.loader import Loader as Loader
from penstock.feed.memory import MemoryEstimate as MemoryEstimate
from penstock.feed.pad import Pad as Pad
from penstock.feed.position import Position as Position
