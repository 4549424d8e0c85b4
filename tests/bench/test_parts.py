"""What all contenders of the remote benchmark are measured against."""

from pathlib import Path

from bench.remote import streaming
from bench.remote.endpoint import serve
from tests.bench.parts_bench import LARGE


def test_the_limit_is_every_byte_of_the_shards_once(tmp_path: Path) -> None:
    shards = LARGE.store(tmp_path)
    with serve(tmp_path) as endpoint:
        rate = streaming.limit(endpoint, shards, LARGE)
        counts = endpoint.counts()
    assert 0 < rate <= 150
    assert counts.n_bytes == sum(path.stat().st_size for path in shards.glob("*.tar"))
    assert counts.requests == 20
