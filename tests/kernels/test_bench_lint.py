"""Every construct of the list is rejected, at its line, and MLX's traps around it too."""

import mlx.core as mx
import pytest
from bench import Bench, SourceRejected
from bench.lint import RULES, Rule

BODY = "\n  threadgroup float shared[4];\n  shared[0] = x[0];\n"


def run(bench: Bench, source: str, header: str = "") -> None:
    kernel = bench.metal_kernel("linted", ["x"], ["out"], source, header)
    kernel(
        inputs=[mx.zeros(8)], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)], output_dtypes=[mx.float32]
    )


@pytest.mark.parametrize("rule", RULES, ids=[rule.construct for rule in RULES])
def test_construct_is_rejected_at_its_line(bench: Bench, rule: Rule) -> None:
    with pytest.raises(SourceRejected) as caught:
        if rule.at_program_scope:
            run(bench, BODY + "  out[0] = 0;", f"\n\n{rule.example}\n")
        else:
            run(bench, f"{BODY}  {rule.example}\n")
    text = str(caught.value)
    assert ("linted (header):3:" if rule.at_program_scope else "linted:4:") in text
    if rule.detector or rule.in_syntax_tree:
        assert rule.reason in text
