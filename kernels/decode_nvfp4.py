import torch

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def decode_nvfp4_rows_torch(packed, scales, scale_2):
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).long()
    factor = scales.view(torch.float8_e4m3fn).float() * scale_2
    values = _E2M1[codes].reshape(packed.shape[0], -1, 16) * factor.unsqueeze(-1)
    return values.reshape(packed.shape[0], -1)


decode_nvfp4_rows = decode_nvfp4_rows_torch
