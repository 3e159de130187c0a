# SPDX-License-Identifier: MIT
"""Our losses inside TRL's GRPOTrainer: the method to copy, and a check that it trains the same weights as TRL's own.

    pip install -r requirements.txt -r experiments/requirements.txt
    python experiments/trl_recipe.py

A random Qwen3-MoE of 44 thousand parameters, 24 updates on 4 generations of 16 responses, some with an empty mask:

    sequence: largest move of a weight 0.008, largest difference between TRL's and ours 1e-07
    token: largest move of a weight 0.01, largest difference between TRL's and ours 0
"""

import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from grpo import grpo_loss
from gspo import gspo_loss


class OursInTRL(GRPOTrainer):
    """TRL's loss_type "grpo" by our losses. Without its extras: KL, entropy, router loss, vLLM's correction, images."""

    def _compute_loss(self, model, inputs):
        if self.use_vllm or self.beta or self.aux_loss_enabled:
            raise ValueError("needs use_vllm=False, beta=0.0, router_aux_loss_coef=0.0: this loss has none of them")
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)  # (B, T); what a tool wrote teaches nothing
        new = self._get_per_token_logps_and_entropies(model, ids, attention, mask.size(1))[0]
        old = inputs.get("old_per_token_logps", new.detach())  # TRL leaves them out where every ratio is 1
        mode, parts = ("train", self.current_gradient_accumulation_steps) if self.model.training else ("eval", 1)
        options = {"clip_eps_low": self.epsilon_low, "clip_eps_high": self.epsilon_high}
        options["num_sequences"] = len(ids) * parts  # TRL counts rows whose mask is empty; we do not
        objective = gspo_loss if self.importance_sampling_level == "sequence" else grpo_loss
        loss, metrics = objective(new, old, inputs["advantages"], mask, **options)
        self._metrics[mode]["clip_frac"].append(metrics["clip_frac"].item())  # of tokens, of this process
        return loss


def train(trainer, level, low, high):
    inner = Tokenizer(models.WordLevel(dict(zip(("<pad>", "<eos>", *"abcdef"), range(8))), unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    shape = Qwen3MoeConfig(
        vocab_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    config = GRPOConfig(
        importance_sampling_level=level, epsilon=low, epsilon_high=high, loss_type="grpo",
        beta=0.0, scale_rewards="group", router_aux_loss_coef=0.0, mask_truncated_completions=True,
        num_generations=8, per_device_train_batch_size=4, gradient_accumulation_steps=2, steps_per_generation=4,
        num_iterations=3, max_steps=24, learning_rate=1e-3, max_completion_length=16, bf16=False, use_cpu=True, seed=0,
        gradient_checkpointing=False, output_dir=tempfile.mkdtemp(), save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": prompt} for prompt in ("ab", "cdef", "fa", "e")])
    run = trainer(
        model=Qwen3MoeForCausalLM(shape), args=config, train_dataset=data, processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [text.count("a") / 16 for text in completions],
    )  # fmt: skip
    run.remove_callback(PrinterCallback)
    before = torch.nn.utils.parameters_to_vector(run.model.parameters()).detach().clone()
    run.train()
    return before, torch.nn.utils.parameters_to_vector(run.model.parameters()).detach()  # (weights,) each


if __name__ == "__main__":
    for level, *window in (("sequence", 3e-4, 4e-4), ("token", 0.2, 0.27)):  # the paper's windows
        start, theirs = train(GRPOTrainer, level, *window)
        _, ours = train(OursInTRL, level, *window)
        print(f"{level}: largest move of a weight {(theirs - start).abs().max():.1g},", end=" ")
        print(f"largest difference between TRL's and ours {(theirs - ours).abs().max():.1g}")
