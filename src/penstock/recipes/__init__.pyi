from penstock.recipes import cellmap as cellmap
from penstock.recipes import chunked as chunked
from penstock.recipes import crossval as crossval
from penstock.recipes import mixture as mixture
from penstock.recipes import streams as streams
from penstock.recipes import trainers as trainers
from penstock.recipes import webdataset as webdataset
from penstock.recipes import workersafe as workersafe
