# SPDX-License-Identifier: MIT
"""How fast: ours against Hugging Face Qwen3-MoE + TRL, on the same weights and the same work.

    pip install -r requirements.txt -r experiments/requirements.txt
    python experiments/bench.py                  all parts; prints a table, writes experiments/results/bench.csv
    python experiments/bench.py rl_step_natural --pairs 9
    python experiments/bench.py --profile laptop_step       where the time of our side goes

For each part two processes stay up, one for each side, and take turns: ours, peer, ours, peer, ... so that a machine
that slows down slows both. What is compared is the ratio within a pair. Before anything is timed, both sides must give
the same log-probs (within 1e-4) for the same tokens. The work is that of a real run: a preset's model after its warm
start, its prompts, responses that end where the model ends them, the verifier's own rewards.

    default_run        `python train.py`, whole, with all cores: seconds
    warm_start         imitation on the same batches
    sample_natural     sampling 32 x 16 responses on the default preset
    rl_step_natural    a step of GSPO on the default preset: sampling, rewards, 4 updates; peak_memory comes with it
    laptop_step        the same on the laptop-gpu preset, on this machine's CPU
    moe_e64_over_e8    our MoE layer with 64 experts against 8, forward and backward: the same work, in smaller pieces

Linux or macOS.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rows import RESULTS, environment, write

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
P = 32
G = 16
UPDATES = 4
UNITS = {
    "default_run": "s",
    "warm_start": "tokens/s",
    "sample_natural": "responses/s",
    "rl_step_natural": "steps/s",
    "peak_memory": "MB",
    "laptop_step": "steps/s",
    "moe_e64_over_e8": "ms",
}
PRESET = {"sample_natural": "tiny", "rl_step_natural": "tiny", "laptop_step": "laptop-gpu"}
TERMS = {"tiny": 6, "laptop-gpu": 10}
LONGEST = {"tiny": 64, "laptop-gpu": 128}


# One side of one part, in a process of its own. It prints "ready", then one measurement for each line it reads.


def our_model(checkpoint):
    from model import load_model

    return load_model(checkpoint)[0].train()


def peer_model(ours):
    """Qwen3-MoE with our weights. Its RoPE turns halves where ours turns neighbours: rows of q and k are reordered."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from sample import BOS, EOS, PAD

    c = ours.config
    config = Qwen3MoeConfig(
        vocab_size=c.vocab_size, hidden_size=c.width, num_hidden_layers=c.layers, num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads, head_dim=c.head_size, moe_intermediate_size=c.expert_width,
        intermediate_size=c.expert_width, num_experts=c.experts, num_experts_per_tok=c.experts_per_token,
        norm_topk_prob=True, router_aux_loss_coef=0.0, output_router_logits=False, tie_word_embeddings=False,
        max_position_embeddings=c.context, rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    config._experts_implementation = "grouped_mm"
    d = c.head_size
    halves = torch.cat([torch.arange(0, d, 2), torch.arange(1, d, 2)])
    weights = {"model.embed_tokens.weight": ours.embed.weight, "model.norm.weight": ours.norm.weight}
    weights["lm_head.weight"] = ours.head.weight
    for i, block in enumerate(ours.blocks):
        q, k, v = block.attention.qkv.weight.view(-1, d, c.width).split((c.heads, c.kv_heads, c.kv_heads))
        for name, value in {
            "self_attn.q_proj.weight": q[:, halves].flatten(0, 1),
            "self_attn.k_proj.weight": k[:, halves].flatten(0, 1),
            "self_attn.v_proj.weight": v.flatten(0, 1),
            "self_attn.o_proj.weight": block.attention.out.weight,
            "self_attn.q_norm.weight": block.attention.q_norm[halves],
            "self_attn.k_norm.weight": block.attention.k_norm[halves],
            "mlp.experts.gate_up_proj": block.moe.w_in.transpose(1, 2),
            "mlp.experts.down_proj": block.moe.w_out.transpose(1, 2),
            "mlp.gate.weight": block.moe.router,
            "input_layernorm.weight": block.attention_norm.weight,
            "post_attention_layernorm.weight": block.moe_norm.weight,
        }.items():
            weights[f"model.layers.{i}.{name}"] = value
    peer = Qwen3MoeForCausalLM(config).float()
    peer.load_state_dict({name: value.detach().clone() for name, value in weights.items()})
    return peer


def check_equal(ours, peer):
    """Both models must score the same tokens alike."""
    import torch

    from model import token_logprobs

    tokens = torch.randint(0, 256, (8, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        a = token_logprobs(ours, tokens)[:, 1:]
        b = peer(input_ids=tokens).logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    worst = (a - b).abs().max().item()
    if worst > 1e-4:
        sys.exit(f"the two models differ by {worst:.1e} on the same tokens: nothing can be compared")


def work(preset="tiny"):
    """(problems, prompts as token lists): the same for both sides."""
    from rewards import make_problem
    from sample import encode_prompt

    rng = random.Random(0)
    problems = [make_problem("chain-sum", rng.randint(2, TERMS[preset]), rng) for _ in range(P)]
    return problems, [encode_prompt(problem.prompt) for problem in problems]


def left_padded(prompts):
    import torch

    from sample import PAD

    longest = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (longest - len(p)) + p for p in prompts]).repeat_interleave(G, 0)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts]).repeat_interleave(G, 0)
    return ids, mask


def sampling(side, checkpoint):
    """Seconds to sample P x G responses."""
    import torch

    import sample

    ours = our_model(checkpoint)
    _, prompts = work()
    if side == "ours":
        return lambda: sample.generate(ours, prompts, samples_per_prompt=G, max_new_tokens=LONGEST["tiny"])
    peer = peer_model(ours).eval()
    check_equal(ours, peer)
    ids, mask = left_padded(prompts)
    options = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, disable_compile=True)

    @torch.inference_mode()
    def run():
        peer.generate(input_ids=ids, attention_mask=mask, max_new_tokens=LONGEST["tiny"], **options)

    return run


def our_settings(preset):
    import train

    sizes = {"prompts": P, "group": G, "minibatches": UPDATES, "max_new_tokens": LONGEST[preset]}
    return train.Settings(preset=preset, device="cpu", lr=1e-4, gspo_clip=[3e-4, 4e-4], **sizes)


def our_rl_step(checkpoint, preset="tiny"):
    """Seconds of a whole step of GSPO."""
    import train

    settings = our_settings(preset)
    learner = train.Learner("gspo", our_model(checkpoint), settings)
    problems, _ = work(preset)
    steps = iter(range(10**6))
    return lambda: train.rl_step(learner, problems, settings, next(steps))


def imitation(side):
    """Seconds of ten steps of imitation on the same batches, from random weights of the default preset's shape."""
    import torch

    import harness
    import imitate
    from model import Transformer
    from sample import PAD

    settings = our_settings("tiny")
    steps = iter(range(10**6))
    torch.manual_seed(0)
    ours = Transformer(settings.model_config)
    if side == "ours":
        trainable = harness.Trainable("warm", ours)
        return lambda: [imitate.imitation_step(trainable, settings, next(steps)) for _ in range(10)]
    peer = peer_model(ours).train()
    check_equal(ours, peer)
    optimizer = torch.optim.AdamW(peer.parameters(), 3e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step():
        solutions, prompts = imitate.worked_solutions(settings, next(steps))
        longest = max(map(len, solutions))
        ids = torch.tensor([row + [PAD] * (longest - len(row)) for row in solutions])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in solutions])
        labels = torch.where((mask == 1) & (torch.arange(longest) >= torch.tensor(prompts)[:, None]), ids, -100)
        out = peer(input_ids=ids, attention_mask=mask, labels=labels, output_router_logits=True, use_cache=False)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return lambda: [step() for _ in range(10)]


def peer_rl_steps(turn, checkpoint, preset="tiny"):
    """TRL runs its own loop; at the end of each step it calls `turn(seconds)`, which returns when it may go on."""
    from datasets import Dataset
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from rewards import accuracy_reward
    from sample import SPECIAL_TOKENS

    names = [chr(i) if i < 128 else f"<{i}>" for i in range(256)] + list(SPECIAL_TOKENS)
    inner = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[0]))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )
    problems, _ = work(preset)
    ours = our_model(checkpoint)
    peer = peer_model(ours)
    check_equal(ours, peer)
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        save_strategy="no", disable_tqdm=True, per_device_train_batch_size=P * G // UPDATES,
        gradient_accumulation_steps=1, steps_per_generation=UPDATES, num_generations=G,
        max_completion_length=LONGEST[preset],
        max_steps=10**6, num_iterations=1, importance_sampling_level="sequence", loss_type="grpo", epsilon=3e-4,
        epsilon_high=4e-4, beta=0.0, scale_rewards="group", router_aux_loss_coef=0.0, temperature=1.0, top_p=1.0,
        top_k=0, learning_rate=1e-4,
        lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0, logging_steps=10**6, seed=0,
        dataloader_pin_memory=False,
    )  # fmt: skip

    class TakeTurns(TrainerCallback):
        updates = 0
        began = None

        def on_step_end(self, args, state, control, **kwargs):
            self.updates += 1
            if self.updates % UPDATES == 0:
                turn(None if self.began is None else time.perf_counter() - self.began)
                self.began = time.perf_counter()

    data = Dataset.from_list([{"prompt": problem.prompt, "solution": problem.answer} for problem in problems] * 50)
    GRPOTrainer(
        model=peer,
        reward_funcs=accuracy_reward,
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[TakeTurns()],
    ).train()


def moe(experts):
    """Seconds of the MoE layer alone, forward and backward, on 4096 tokens. `side` is the number of experts."""
    import torch

    from moe import MoE

    torch.manual_seed(0)
    layer = MoE(128, experts, 2, 128)
    x = torch.randn(4096, 128, requires_grad=True)

    def run():
        x.grad = None
        layer.zero_grad(set_to_none=True)
        layer(x)[0].square().sum().backward()

    return run


def child(part, side, threads, checkpoint):
    import torch

    torch.set_num_threads(threads)

    def turn(seconds):
        """Tell the time of the work done; wait for the word to do more."""
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
        print(json.dumps({"seconds": seconds, "memory": memory}), flush=True)
        if not sys.stdin.readline():
            os._exit(0)

    preset = PRESET.get(part, "tiny")
    if part in ("rl_step_natural", "laptop_step") and side == "peer":
        peer_rl_steps(turn, checkpoint, preset)
    run = {
        "sample_natural": lambda: sampling(side, checkpoint),
        "rl_step_natural": lambda: our_rl_step(checkpoint),
        "laptop_step": lambda: our_rl_step(checkpoint, preset),
        "warm_start": lambda: imitation(side),
        "moe_e64_over_e8": lambda: moe(64 if side == "ours" else 8),
    }[part]()
    run()  # once to warm up
    seconds = None
    while True:
        turn(seconds)
        began = time.perf_counter()
        run()
        seconds = time.perf_counter() - began


# Both sides in turns


class Side:
    def __init__(self, part, side, threads, checkpoint):
        env = environment(threads) | {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "TOKENIZERS_PARALLELISM": "false",
        }
        words = [sys.executable, __file__, "--child", part, side, "--threads", str(threads)]
        words += ["--checkpoint", str(checkpoint)] if checkpoint else []
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(words, env=env, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        self.answer()

    def answer(self):
        for line in self.process.stdout:
            if line.startswith('{"seconds"'):
                return json.loads(line)
        sys.exit(f"a side ended without an answer: run it by hand: {' '.join(self.process.args)}")

    def measure(self):
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def median(values):
    values = sorted(values)
    return (values[len(values) // 2] + values[(len(values) - 1) // 2]) / 2


def take_turns(part, pairs, threads, checkpoint):
    sides = [Side(part, side, threads, checkpoint) for side in ("ours", "peer")]
    results = [[side.measure() for side in sides] for _ in range(pairs)]
    for side in sides:
        side.end()
    return results


def row(part, ours, peer, ratios, threads):
    """ours, peer: what was measured; ratios: ours over peer, pair by pair, above 1 where more of `unit` is better."""
    return {
        "part": part, "ours": f"{ours:.4g}", "peer": f"{peer:.4g}" if peer else "", "unit": UNITS[part],
        "ratio_median": f"{median(ratios):.3g}" if ratios else "", "ratio_min": f"{min(ratios):.3g}" if ratios else "",
        "ratio_max": f"{max(ratios):.3g}" if ratios else "", "pairs": len(ratios) or 1, "threads": threads,
    }  # fmt: skip


def bench(part, pairs, threads, checkpoint):
    """Rows of the table for one part (two for rl_step_natural: its memory is a part of its own)."""
    results = take_turns(part, pairs, threads, checkpoint)
    ours = [pair[0]["seconds"] for pair in results]
    peer = [pair[1]["seconds"] for pair in results]
    faster = [b / a for a, b in zip(ours, peer)]
    if part == "moe_e64_over_e8":  # here "peer" is the same layer with 8 experts, and less is better
        slower = [a / b for a, b in zip(ours, peer)]
        return [row(part, 1e3 * median(ours), 1e3 * median(peer), slower, threads)]
    amount = 1
    if part == "sample_natural":
        amount = P * G
    if part == "warm_start":
        import imitate

        settings = our_settings("tiny")
        amount = sum(sum(map(len, imitate.worked_solutions(settings, step)[0])) for step in range(10))
    rows = [row(part, amount / median(ours), amount / median(peer), faster, threads)]
    if part == "rl_step_natural":
        ours, peer = (results[-1][side]["memory"] for side in (0, 1))
        rows.append(row("peak_memory", ours, peer, [ours / peer], threads))
    return rows


def profile(part, checkpoint):
    """Where the time of our side goes: prints seconds of one step, the third, part by part."""
    import train

    spent = {}

    def timed(holder, name, label):
        function = getattr(holder, name)

        def wrapped(*args, **kwargs):
            began = time.perf_counter()
            result = function(*args, **kwargs)
            spent[label] = spent.get(label, 0) + time.perf_counter() - began
            return result

        setattr(holder, name, wrapped)

    run = our_rl_step(checkpoint, PRESET[part])
    for _ in range(2):  # to warm up
        run()
    timed(train, "respond", "sampling")
    timed(train, "verify", "rewards")
    timed(train, "update", "log-probs, backward, optimizer")
    timed(train.Learner, "step", "of these, optimizer")
    timed(train, "rl_step", "the step")
    run()
    for label, seconds in spent.items():
        print(f"{label:<32}{seconds:7.3f} s {seconds / spent['the step']:6.1%}")


def default_run(folder, *flags):
    """`python train.py`, from nothing to both curves, with all of this machine's cores."""
    began = time.perf_counter()
    command = [sys.executable, "train.py", "--out", str(folder), *flags]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return row("default_run", time.perf_counter() - began, None, [], os.cpu_count())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(UNITS)} (default: all)")
    parser.add_argument("--pairs", type=int, default=5, help="turns of each side (default: 5)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each side (default: 1)")
    parser.add_argument("--profile", metavar="PART", choices=tuple(PRESET), help="where the time of our side goes")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(*args.child, args.threads, args.checkpoint)
    parts = [args.profile] if args.profile else args.parts or [part for part in UNITS if part != "peak_memory"]
    if unknown := [part for part in parts if part not in UNITS or part == "peak_memory"]:
        parser.error(
            f"unknown part {unknown[0]}: choose from {', '.join(UNITS)} (peak_memory comes with rl_step_natural)"
        )

    rows = []
    checkpoints = {}
    with tempfile.TemporaryDirectory() as folder:
        for preset in dict.fromkeys(PRESET[part] for part in parts if part in PRESET):
            print(f"warm start of {preset} ...", file=sys.stderr)
            # the default run is timed from nothing; a larger preset's warm start is kept for the next time
            whole = preset == "tiny" and "default_run" in parts
            place = Path(folder) / preset if whole else ROOT / "out" / f"bench-{preset}"
            checkpoints[preset] = place / "warm.pt"
            if whole:
                rows.append(default_run(place, "--preset", preset))
            elif not checkpoints[preset].exists():
                default_run(place, "--preset", preset, "--rl-steps", "1", "--eval-problems", "1")
        if args.profile:
            import torch

            torch.set_num_threads(args.threads)
            return profile(args.profile, checkpoints[PRESET[args.profile]])
        for part in parts:
            if part != "default_run":
                print(f"{part} ...", file=sys.stderr)
                rows += bench(part, args.pairs, args.threads, checkpoints.get(PRESET.get(part)))
            elif not rows:
                rows.append(default_run(Path(folder) / "run"))
    print(" | ".join(rows[0]))
    for r in rows:
        print(" | ".join(str(value) for value in r.values()))
    if not args.parts:
        path = RESULTS / "bench.csv"
        write(path, rows)
        print(f"written to {path}")


if __name__ == "__main__":
    main()
