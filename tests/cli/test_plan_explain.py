"""`dure plan layouts --explain`: every term of a layout."""

from tests.cli.planned import LLAMA, answered, called


def test_a_row_is_explained_by_number_or_as_it_is_printed():
    assert called(*LLAMA, "--explain", "zero1,cp=2,pp=4")[1].startswith("zero1,cp=2,pp=4,")
    text = answered(*LLAMA)["rows"][2]["layout"]["text"]
    by_number = called(*LLAMA, "--explain", "3")
    assert by_number == called(*LLAMA, "--explain", text)
    _, out, _ = by_number
    assert out.startswith(text)
    for words in ("gemm_h100 = ", "(llm_foundry, ", "tokens 4096", "Time in s", "Memory in GB"):
        assert words in out
