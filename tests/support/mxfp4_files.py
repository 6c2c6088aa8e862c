"""gpt-oss in MXFP4, as its authors' files have it, and the checkpoint with the same values."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

E2M1 = torch.tensor([sign * number for sign in (1, -1) for number in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])
IGNORED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def write_mxfp4(directory: Path, source: Path, values: Path) -> Path:
    """Write the gpt-oss of `source`, whose experts are not quantized, to `directory` with experts in MXFP4, and to
    `values` with their values.
    """
    tensors = load_file(source / "model.safetensors")
    stored, same = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = same[name] = tensor
            continue
        rows = tensor.float().mT  # [E, output, input]
        groups = rows.unflatten(-1, (-1, 32))
        exponents = (groups.abs().amax(-1) / 4).log2().round()
        codes = (groups[..., None] / exponents.exp2()[..., None, None] - E2M1).abs().argmin(-1)
        stored[f"{name}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
        stored[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
        same[name] = (E2M1[codes] * exponents.exp2()[..., None]).flatten(2).mT.contiguous().to(tensor.dtype)
    config = json.loads((source / "config.json").read_text())
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": IGNORED}
    for path, content, extra in ((directory, stored, {"quantization_config": quantization}), (values, same, {})):
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config | extra))
        save_file(content, path / "model.safetensors", {"format": "pt"})
    return directory
