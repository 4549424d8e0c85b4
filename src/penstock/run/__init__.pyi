from penstock.run.options import RunOptions as RunOptions
