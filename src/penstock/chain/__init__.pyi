from penstock.chain.dataset import Dataset as Dataset
from penstock.chain.dataset import open as open
