"""Convert recordings to shards: `penstock convert` with the inputs after `--input`."""

from penstock.cli.main import run_script

if __name__ == "__main__":
    run_script()
