from penstock.shard.index_tars import index_archives as index_archives
from penstock.shard.outputs.write_options import WriteOptions as WriteOptions
from penstock.shard.verify import verify_shards as verify_shards
