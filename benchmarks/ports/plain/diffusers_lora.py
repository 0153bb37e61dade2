"""Train adapters of a denoising UNet of diffusers: noise and times drawn for each batch, adapters saved alone."""

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DConditionModel
from diffusers.optimization import get_scheduler
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict


def main():
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(16, 32),
        norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16, attention_head_dim=4,
    )  # fmt: skip
    noise_scheduler = DDPMScheduler(num_train_timesteps=100)
    unet.requires_grad_(False)
    unet.add_adapter(LoraConfig(r=4, lora_alpha=4, init_lora_weights="gaussian",
                                target_modules=["to_k", "to_q", "to_v", "to_out.0"]))  # fmt: skip
    lora_layers = [p for p in unet.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(lora_layers, lr=1e-2)
    lr_scheduler = get_scheduler("constant_with_warmup", optimizer=optimizer, num_warmup_steps=2)
    latents, captions = torch.randn(12, 4, 8, 8), torch.randn(12, 5, 16)
    log = []
    unet.train()
    for start in range(0, 12, 4):
        batch = latents[start : start + 4]
        noise = torch.randn_like(batch)
        timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (len(batch),)).long()
        noisy_latents = noise_scheduler.add_noise(batch, noise, timesteps)
        encoder_hidden_states = captions[start : start + 4]
        model_pred = unet(noisy_latents, timesteps, encoder_hidden_states, return_dict=False)[0]
        loss = F.mse_loss(model_pred, noise, reduction="mean")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lora_layers, 1.0)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        log.append(loss.item())
    torch.save(get_peft_model_state_dict(unet), "ckpt.pt")
    return log


if __name__ == "__main__":
    main()
