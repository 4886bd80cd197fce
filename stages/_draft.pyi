INTERFACE: int

def available() -> str | None: ...
def product(
    form: int, weights: int, x: int, out: int, rows: int, cols: int, outputs: int, /
) -> None: ...
def draft_room(layers: bytes, rows: int, /) -> int: ...
def draft_layers(layers: bytes, step: bytes, /) -> None: ...
def outlook(
    scores: int,
    rows: int,
    vocab: int,
    factor: float,
    count: int,
    values: int,
    tokens: int,
    sums: int,
    /,
) -> None: ...
def plain(yes: bool, /) -> None: ...
