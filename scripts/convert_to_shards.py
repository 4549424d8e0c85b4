"""Convert recordings to shards, as the document calls it; the same as `penstock convert`, with `--input`."""

from penstock.cli_convert import run_document_script

if __name__ == "__main__":
    run_document_script()
