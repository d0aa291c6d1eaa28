"""The kinds of adapters that PEFT writes beside LoRA, each with what its owner can do instead."""

from __future__ import annotations

LORA = "LORA"
_CONVERT = (
    "convert the adapter to LoRA with PEFT's save_as_lora and register the result, or merge it into the base model "
    "(merge_and_unload) and serve that"
)
_MERGE = "train LoRA, or merge the adapter into the base model (merge_and_unload) and serve that as a base model"
_TRAIN = "it cannot be merged into the base model; train LoRA"
_PLAIN_TRAIN = "train LoRA"

# What each is called, and the advice. The advice is PEFT's own state: which kinds it converts, and which it merges.
OTHER_TYPES = {
    "ADALORA": ("AdaLoRA", _MERGE),
    "ADAMSS": ("AdaMSS", _MERGE),
    "ADAPTION_PROMPT": ("LLaMA-Adapter", _TRAIN),
    "BEFT": ("BEFT", _PLAIN_TRAIN),
    "BOFT": ("BOFT", _MERGE),
    "BONE": ("Bone", _PLAIN_TRAIN),  # until PEFT 0.17; later MiSS
    "C3A": ("C3A", _CONVERT),
    "CARTRIDGE": ("Cartridges", _TRAIN),
    "CPT": ("context-aware prompt tuning", _TRAIN),
    "DEFT": ("DEFT", _PLAIN_TRAIN),
    "DELORA": ("DeLoRA", _CONVERT),
    "FOURIERFT": ("FourierFT", _CONVERT),
    "FROD": ("FRoD", _PLAIN_TRAIN),
    "GLORA": ("GLoRA", _MERGE),
    "GRALORA": ("GraLoRA", _CONVERT),
    "HIRA": ("HiRA", _MERGE),
    "HRA": ("HRA", _MERGE),
    "IA3": ("IA3", _MERGE),
    "LILY": ("Lily", _PLAIN_TRAIN),
    "LN_TUNING": ("LayerNorm tuning", _MERGE),
    "LOHA": ("LoHa", _CONVERT),
    "LOKR": ("LoKr", _CONVERT),
    "MISS": ("MiSS", _CONVERT),
    "MULTITASK_PROMPT_TUNING": ("multitask prompt tuning", _TRAIN),
    "OFT": ("OFT", _MERGE),
    "OSF": ("OSF", _PLAIN_TRAIN),
    "PEANUT": ("PEANuT", _PLAIN_TRAIN),
    "POLY": ("Poly", _TRAIN),
    "PREFIX_TUNING": ("prefix tuning", _TRAIN),
    "PROMPT_TUNING": ("prompt tuning", _TRAIN),
    "PSOFT": ("PSOFT", _CONVERT),
    "PVERA": ("PVeRA", _PLAIN_TRAIN),
    "P_TUNING": ("P-tuning", _TRAIN),
    "RANDLORA": ("RandLoRA", _CONVERT),
    "ROAD": ("RoAd", _MERGE),
    "SHADOW": ("Shadow", _PLAIN_TRAIN),
    "SHIRA": ("SHiRA", _MERGE),
    "SUPERTUNING": ("Super-Tuning", _PLAIN_TRAIN),
    "TINYLORA": ("TinyLoRA", _CONVERT),
    "TRAINABLE_TOKENS": ("trainable tokens", _PLAIN_TRAIN + " with trainable_token_indices"),
    "UNILORA": ("Uni-LoRA", _CONVERT),
    "VBLORA": ("VB-LoRA", _CONVERT),
    "VERA": ("VeRA", _CONVERT),
    "WAVEFT": ("WaveFT", _CONVERT),
    "XLORA": ("X-LoRA", _TRAIN),
}


def advice_for(peft_type: object) -> str:
    """What to say of an adapter that is not LoRA: its kind, and the next step."""
    known = OTHER_TYPES.get(peft_type) if isinstance(peft_type, str) else None
    if known is None:
        return 'only "LORA" adapters are served; train LoRA'
    name, advice = known
    return f"{name} is not served; {advice}"
