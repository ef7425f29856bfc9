"""The names of mixes. It imports no formats, so that --help need not wait for numpy."""

from __future__ import annotations

# general.file_type of each mix, and the format of most tensors (llama_ftype).
TABLE = {
    **{"F32": (0, "F32"), "F16": (1, "F16"), "BF16": (32, "BF16")},
    **{"Q4_0": (2, "Q4_0"), "Q4_1": (3, "Q4_1"), "Q5_0": (8, "Q5_0"), "Q5_1": (9, "Q5_1")},
    **{"Q8_0": (7, "Q8_0"), "Q2_K": (10, "Q2_K"), "Q2_K_S": (21, "Q2_K")},
    **{"Q3_K_S": (11, "Q3_K"), "Q3_K_M": (12, "Q3_K"), "Q3_K_L": (13, "Q3_K")},
    **{"Q4_K_S": (14, "Q4_K"), "Q4_K_M": (15, "Q4_K"), "Q5_K_S": (16, "Q5_K")},
    **{"Q5_K_M": (17, "Q5_K"), "Q6_K": (18, "Q6_K"), "IQ4_NL": (25, "IQ4_NL")},
    **{"IQ3_S": (26, "IQ3_S"), "IQ3_M": (27, "IQ3_S"), "IQ4_XS": (30, "IQ4_XS")},
    **{"TQ1_0": (36, "TQ1_0"), "TQ2_0": (37, "TQ2_0")},
    # llama.cpp makes MXFP4 of experts only (MXFP4_MOE); MXFP4 and NVFP4 here are for all matrices.
    **{"MXFP4_MOE": (38, "MXFP4"), "MXFP4": (38, "MXFP4"), "NVFP4": (39, "NVFP4")},
    # Ours: a scale for each row. llama.cpp has neither such files nor a number for them.
    **{"W8A16": (None, "I8"), "W8A8": (None, "I8"), "W4A16": (None, "Q4_0")},
    **{"W8A16_FP8": (None, "F8_E4M3"), "W8A8_FP8": (None, "F8_E4M3")},
}
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "FP8": "W8A8_FP8"}
