# SPDX-License-Identifier: MIT
"""Our losses inside TRL's GRPOTrainer: the method to copy, and a check that it trains the same weights as TRL's own.

    pip install -r requirements.txt -r experiments/requirements.txt
    python experiments/trl_recipe.py

A random Qwen3-MoE of 44 thousand parameters is trained from one start with either, on a CPU, nothing downloaded: 24
updates on 4 generations of 16 responses. A response that does not end by itself has an empty mask. Seconds later:

    sequence: largest move of a weight 0.008, largest difference between TRL's and ours 1e-08
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

WINDOWS = {"sequence": (3e-4, 4e-4), "token": (0.2, 0.27)}  # those of the paper, as in our losses' signatures


class OursInTRL(GRPOTrainer):
    """TRL's loss_type "grpo" by our losses. Without its extras: KL, entropy, router loss, vLLM's correction, images."""

    def _compute_loss(self, model, inputs):
        mask = inputs["completion_mask"]  # (B, T)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], mask], 1)
        new = self._get_per_token_logps_and_entropies(model, ids, attention, mask.size(1))[0]
        old = inputs.get("old_per_token_logps", new.detach())  # TRL leaves them out where every ratio is 1
        count = len(ids) * self.current_gradient_accumulation_steps  # TRL counts rows whose mask is empty; we do not
        window = {"clip_eps_low": self.epsilon_low, "clip_eps_high": self.epsilon_high}
        loss = gspo_loss if self.importance_sampling_level == "sequence" else grpo_loss
        return loss(new, old, inputs["advantages"], mask, **window, num_sequences=count)[0]


def train(trainer, level):
    def share_of_a(completions, **kwargs):
        return [text.count("a") / 16 for text in completions]

    names = ["<pad>", "<eos>", *"abcdef"]
    inner = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    shape = Qwen3MoeConfig(
        vocab_size=len(names), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(shape)
    config = GRPOConfig(
        importance_sampling_level=level, epsilon=WINDOWS[level][0], epsilon_high=WINDOWS[level][1], loss_type="grpo",
        beta=0.0, scale_rewards="group", router_aux_loss_coef=0.0, mask_truncated_completions=True,
        num_generations=8, per_device_train_batch_size=4, gradient_accumulation_steps=2, steps_per_generation=4,
        num_iterations=3, max_steps=24, learning_rate=1e-3, max_completion_length=16, bf16=False, use_cpu=True, seed=0,
        gradient_checkpointing=False, output_dir=tempfile.mkdtemp(), save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": prompt} for prompt in ("ab", "cdef", "fa", "e")])
    run = trainer(model=model, reward_funcs=share_of_a, args=config, train_dataset=data, processing_class=tokenizer)
    run.remove_callback(PrinterCallback)
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    run.train()
    return before, torch.nn.utils.parameters_to_vector(model.parameters()).detach()  # (weights,) each


if __name__ == "__main__":
    for level in WINDOWS:
        start, theirs = train(GRPOTrainer, level)
        _, ours = train(OursInTRL, level)
        print(f"{level}: largest move of a weight {(theirs - start).abs().max():.1g},", end=" ")
        print(f"largest difference between TRL's and ours {(theirs - ours).abs().max():.1g}")
