"""The account as text."""

from circuitgraph.checkpoint.account import ReportRow
from circuitgraph.checkpoint.report import format_report


def test_a_line_a_tensor() -> None:
    rows = [
        ReportRow("m.fc.weight", "used", "fc", "drafter", "F8_E4M3[64, 128]", "fp8 block 128x128 -> bf16"),
        ReportRow("m.fc.weight_scale_inv", "used", "fc", "drafter", "f32[1, 1]", "scale of m.fc.weight"),
        ReportRow("lm_head.weight", "borrowed", "lm_head", "target", "bf16[512, 64]"),
        ReportRow("d2t", "waived", "", "drafter", "i64[512]", "the caller adds it"),
    ]
    assert format_report(rows) == (
        "used      drafter  m.fc.weight            F8_E4M3[64, 128]  fc: fp8 block 128x128 -> bf16\n"
        "used      drafter  m.fc.weight_scale_inv  f32[1, 1]         fc: scale of m.fc.weight\n"
        "borrowed  target   lm_head.weight         bf16[512, 64]     lm_head\n"
        "waived    drafter  d2t                    i64[512]          the caller adds it\n"
        "2 tensors used, 1 borrowed, 1 waived\n"
    )
