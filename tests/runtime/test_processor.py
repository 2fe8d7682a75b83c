"""What the flags of a processor say."""

import pytest

from covey.runtime.processor import cpu_multiplies_int8


@pytest.mark.parametrize(
    ("flags", "able"),
    [
        ("fpu avx2 avx512f", False),
        ("fpu avx2 avx_vnni", True),
        ("fpu avx512f avx512_vnni", True),
        ("fpu amx_int8", True),
        ("", False),
    ],
)
def test_vnni_and_amx_multiply_int8(tmp_path, monkeypatch, flags, able):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    assert cpu_multiplies_int8(str(cpuinfo)) is able
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "avx512_core")  # as on a processor without VNNI
    assert cpu_multiplies_int8(str(cpuinfo)) is False
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2_VNNI")
    assert cpu_multiplies_int8(str(cpuinfo)) is able
