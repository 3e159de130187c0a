# SPDX-License-Identifier: MIT
"""How fast: ours against Hugging Face Qwen3-MoE + TRL, on the same weights and the same work.

    pip install -r requirements.txt -r experiments/requirements.txt
    python experiments/bench.py                  all parts; prints a table, writes experiments/results/bench.csv
    python experiments/bench.py rl_step --pairs 9

For each part two processes stay up, one for each side, and take turns: ours, peer, ours, peer, ... so that a machine
that slows down slows both. What is compared is the ratio within a pair. Before anything is timed, both sides must give
the same log-probs (within 1e-4) for the same tokens. Shape of the yardstick: C=128, L=4, H=4, 2 key/value heads, E=8,
K=2, expert width 128, our byte vocabulary; 32 prompts x 16 samples, 64 new tokens, 4 updates a step. What a real run
does is measured on a preset after its warm start, with responses that end where the model ends them and the verifier's
own rewards: sample_natural, rl_step_natural and second_core (our step with two threads and with one) on the default
preset, laptop_step on laptop-gpu. warm_start is imitation on the same batches. Linux or macOS.

    python experiments/bench.py --profile laptop_step       where the time of our side goes
"""

import argparse
import csv
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
P, G, NEW, UPDATES = 32, 16, 64, 4
UNITS = {
    "sample_forced": "tokens/s",
    "sample_natural": "responses/s",
    "logprobs_fwd_bwd": "tokens/s",
    "rl_step": "steps/s",
    "rl_step_natural": "steps/s",
    "laptop_step": "steps/s",
    "warm_start": "tokens/s",
    "second_core": "s",
    "peak_memory": "MB",
    "moe_e64_over_e8": "ms",
    "flop_bound": "GFLOP/s",
    "default_run": "s",
}
PRESET = {"sample_natural": "tiny", "rl_step_natural": "tiny", "second_core": "tiny", "laptop_step": "laptop-gpu"}
TERMS, LONGEST = {"tiny": 6, "laptop-gpu": 10}, {"tiny": NEW, "laptop-gpu": 128}


# ---------------------------------------------------------------------------------------------------------------------
# One side of one part, in a process of its own. It prints "ready", then one measurement for each line it reads.


def our_model(checkpoint):
    import torch

    from model import ModelConfig, Transformer, load_model

    if checkpoint:
        return load_model(checkpoint)[0].train()
    torch.manual_seed(0)
    return Transformer(ModelConfig(width=128, layers=4, heads=4, kv_heads=2, expert_width=128))


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
    config._attn_implementation, config._experts_implementation = "sdpa", "grouped_mm"
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
    """Seconds to sample P x G responses; without a checkpoint the end token is ignored, so that each has NEW tokens."""
    import torch

    import sample

    ours, (_, prompts) = our_model(checkpoint), work()
    if side == "ours":
        if not checkpoint:
            sample.ended_places = lambda token: []
        return lambda: sample.generate(ours, prompts, samples_per_prompt=G, max_new_tokens=NEW)
    peer = peer_model(ours).eval()
    check_equal(ours, peer)
    ids, mask = left_padded(prompts)
    options = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=NEW, disable_compile=True)
    if not checkpoint:
        options["min_new_tokens"] = NEW

    @torch.inference_mode()
    def run():
        peer.generate(input_ids=ids, attention_mask=mask, **options)

    return run


def logprobs(side):
    """Seconds of a forward and backward pass over P x G rows of prompt and NEW tokens, in chunks as each likes best."""
    import torch

    from model import score, split_by_length

    ours, (_, prompts) = our_model(None), work()
    new = torch.randint(0, 256, (P * G, NEW), generator=torch.Generator().manual_seed(2))
    if side == "ours":
        from sample import PAD

        rows = [prompts[i // G] + new[i].tolist() for i in range(P * G)]
        chunks = []
        for chunk in split_by_length([len(row) for row in rows], 2048):
            longest = max(len(rows[i]) for i in chunk)
            tokens = torch.tensor([rows[i] + [PAD] * (longest - len(rows[i])) for i in chunk])
            chunks.append((tokens, [(len(rows[i]) - NEW, len(rows[i])) for i in chunk]))

        def run():
            ours.zero_grad(set_to_none=True)
            for tokens, spans in chunks:
                (-score(ours, tokens, spans)[0].sum() / (P * G * NEW)).backward()

        return run
    from trl.trainer.utils import selective_log_softmax

    peer = peer_model(ours).train()
    check_equal(ours, peer)
    ids, mask = left_padded(prompts)
    ids, mask = torch.cat([ids, new], 1), torch.cat([mask, torch.ones_like(new)], 1)

    def run():
        peer.zero_grad(set_to_none=True)
        for part, part_mask in zip(ids.split(128), mask.split(128)):
            out = peer(input_ids=part, attention_mask=part_mask, logits_to_keep=NEW + 1, use_cache=False)
            (-selective_log_softmax(out.logits[:, :-1], part[:, -NEW:]).sum() / (P * G * NEW)).backward()

    return run


def jitter(text):
    """Random weights never solve a problem: a hash of the text as reward keeps the work alive."""
    return 0.01 * (sum(text.encode()) % 7)


def our_settings(preset):
    import train

    sizes = f"--prompts {P} --group {G} --minibatches {UPDATES} --max-new-tokens {LONGEST[preset]}"
    return train.parse_settings(f"--preset {preset} --device cpu {sizes} --lr 1e-4 --gspo-clip 3e-4 4e-4".split())[0]


def our_rl_step(checkpoint, preset="tiny", learners=("gspo",)):
    """Seconds of a whole step of these learners; without a checkpoint as in `sampling`, and with made-up rewards."""
    import copy

    import torch

    import harness
    import sample
    import train

    if not checkpoint:
        sample.ended_places = lambda token: []
        train.verify = lambda problems, texts, group: [jitter(text) for text in texts]
    settings, model = our_settings(preset), our_model(checkpoint)
    racing = [train.Learner(name, copy.deepcopy(model), settings) for name in learners]
    problems, steps, cpu = work(preset)[0], iter(range(10**6)), torch.device("cpu")

    def run():
        step = next(steps)
        harness.side_by_side(lambda learner: train.rl_step(learner, problems, settings, step, cpu), racing, cpu)

    return run


def imitation(side):
    """Seconds of ten steps of imitation on the same batches, from random weights of the default preset's shape."""
    import torch

    import train
    from model import Transformer
    from sample import PAD

    settings, steps = our_settings("tiny"), iter(range(10**6))
    torch.manual_seed(0)
    ours = Transformer(settings.model_config)
    if side == "ours":
        learner = train.Learner("warm", ours, settings)
        return lambda: [train.imitate(learner, settings, next(steps), torch.device("cpu")) for _ in range(10)]
    peer = peer_model(ours).train()
    check_equal(ours, peer)
    optimizer = torch.optim.AdamW(peer.parameters(), 3e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step():
        solutions, prompts = train.worked_solutions(settings, next(steps))
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
    problems, ours = work(preset)[0], our_model(checkpoint)
    peer = peer_model(ours)
    check_equal(ours, peer)
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        save_strategy="no", disable_tqdm=True, per_device_train_batch_size=P * G // UPDATES,
        gradient_accumulation_steps=1, steps_per_generation=UPDATES, num_generations=G,
        max_completion_length=LONGEST[preset],
        max_steps=10**6, num_iterations=1, importance_sampling_level="sequence", loss_type="grpo", epsilon=3e-4,
        epsilon_high=4e-4, beta=0.0, scale_rewards="group", router_aux_loss_coef=0.0, temperature=1.0, top_p=1.0,
        top_k=0, generation_kwargs={} if checkpoint else {"min_new_tokens": NEW}, learning_rate=1e-4,
        lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0, logging_steps=10**6, seed=0,
        dataloader_pin_memory=False,
    )  # fmt: skip

    class TakeTurns(TrainerCallback):
        updates, began = 0, None

        def on_step_end(self, args, state, control, **kwargs):
            self.updates += 1
            if self.updates % UPDATES == 0:
                turn(None if self.began is None else time.perf_counter() - self.began)
                self.began = time.perf_counter()

    def made_up(completions, **kwargs):
        return [jitter(text) for text in completions]

    data = Dataset.from_list([{"prompt": problem.prompt, "solution": problem.answer} for problem in problems] * 50)
    GRPOTrainer(
        model=peer,
        reward_funcs=accuracy_reward if checkpoint else made_up,
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
    layer, x = MoE(128, experts, 2, 128), torch.randn(4096, 128, requires_grad=True)

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
    if part in ("rl_step", "rl_step_natural", "laptop_step") and side == "peer":
        peer_rl_steps(turn, checkpoint, preset)
    run = {
        "sample_forced": lambda: sampling(side, checkpoint),
        "sample_natural": lambda: sampling(side, checkpoint),
        "logprobs_fwd_bwd": lambda: logprobs(side),
        "rl_step": lambda: our_rl_step(checkpoint),
        "rl_step_natural": lambda: our_rl_step(checkpoint),
        "laptop_step": lambda: our_rl_step(checkpoint, preset),
        "second_core": lambda: our_rl_step(checkpoint, preset, ("gspo", "grpo")),
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


# ---------------------------------------------------------------------------------------------------------------------
# Both sides in turns


class Side:
    def __init__(self, part, side, threads, checkpoint):
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
        env = os.environ | {name: str(threads) for name in names}
        env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
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
    two = part == "second_core"  # there both sides are ours: with two threads, and with one
    sides = [Side(part, side, 2 if two and side == "ours" else threads, checkpoint) for side in ("ours", "peer")]
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
    """Rows of the table for one part (two for rl_step: its memory is a part of its own)."""
    if part == "flop_bound":
        return [flop_bound(pairs, threads)]
    amount = {"sample_forced": P * G * NEW, "sample_natural": P * G}.get(part, 1)
    if part == "logprobs_fwd_bwd":
        amount = sum(len(prompt) for prompt in work()[1]) * G + P * G * NEW
    results = take_turns(part, pairs, threads, checkpoint)
    ours, peer = ([pair[side]["seconds"] for pair in results] for side in (0, 1))
    if part == "warm_start":
        import train

        amount = sum(sum(map(len, train.worked_solutions(our_settings("tiny"), step)[0])) for step in range(10))
    if part == "second_core":
        return [row(part, median(ours), median(peer), [b / a for a, b in zip(ours, peer)], threads)]
    if part == "moe_e64_over_e8":  # here "peer" is the same layer with 8 experts, and less is better
        ratios = [a / b for a, b in zip(ours, peer)]
        return [row(part, 1e3 * median(ours), 1e3 * median(peer), ratios, threads)]
    rows = [row(part, amount / median(ours), amount / median(peer), [b / a for a, b in zip(ours, peer)], threads)]
    if part == "rl_step":
        a, b = (results[-1][side]["memory"] for side in (0, 1))
        rows.append(row("peak_memory", a, b, [a / b], threads))
    return rows


def flop_bound(pairs, threads):
    """Useful FLOPs of log-probs, forward and backward, per second, against what a large matrix product reaches here."""
    import torch

    torch.set_num_threads(threads)
    a = torch.randn(1024, 1024)
    (_, prompts), config = work(), our_model(None).config
    _, active = our_model(None).num_parameters()
    head = config.width * config.vocab_size
    tokens = sum(len(prompt) + NEW - 1 for prompt in prompts) * G
    # 2 FLOPs per weight forward, 4 backward; the head works on responses alone; attention over the positions before
    flops = 6 * ((active - head) * tokens + head * P * G * NEW)
    pairs_seen = sum(n * (n + 1) // 2 for prompt in prompts for n in [len(prompt) + NEW - 1]) * G
    flops += 3 * 4 * config.layers * config.width * pairs_seen
    side, ours, peak = Side("logprobs_fwd_bwd", "ours", threads, None), [], []
    for _ in range(pairs):
        ours.append(flops / side.measure()["seconds"] / 1e9)
        began = time.perf_counter()
        for _ in range(20):
            a @ a
        peak.append(20 * 2 * 1024**3 / (time.perf_counter() - began) / 1e9)
    side.end()
    return row("flop_bound", median(ours), median(peak), [b / a for a, b in zip(ours, peak)], threads)


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
    run(), run()  # to warm up
    timed(train, "respond", "sampling")
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
        parser.error(f"unknown part {unknown[0]}: choose from {', '.join(UNITS)} (peak_memory comes with rl_step)")

    rows, checkpoints = [], {}
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
        path = Path(__file__).parent / "results" / "bench.csv"
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        print(f"written to {path}")


if __name__ == "__main__":
    main()
