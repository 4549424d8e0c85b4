from penstock.shard.writer import WriteOptions as WriteOptions
