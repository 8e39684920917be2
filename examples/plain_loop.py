"""A plain PyTorch loop publishes every step; a transformers model takes each of them between two `generate` calls.

    python examples/plain_loop.py

Trainer and engine are two threads of one program here. They only share an address: as two programs of one host they run the same lines.
"""

from __future__ import annotations

import threading

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import liveweight as lw

STEPS = 4


def tiny_model() -> Qwen3ForCausalLM:
    """The same architecture on both sides; any module of torch would do."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config)


def train(model: Qwen3ForCausalLM, address: str) -> None:
    """An ordinary loop, and one line more."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with lw.Publisher(model, engines=[address]) as publisher:
        for step in range(1, STEPS + 1):
            tokens = torch.randint(1, 256, (4, 16))
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report = publisher.publish(step)  # RoundFailed: the engine still holds step - 1
            print(f"step {step}: loss {loss.item():.3f}, {report.size_bytes} bytes verified", flush=True)


def main() -> None:
    """Generate, and look for new weights in between, as long as the trainer runs."""
    torch.set_num_threads(1)
    trained, engine = tiny_model(), tiny_model().eval()
    prompt = torch.tensor([[1, 2, 3]])
    with lw.Receiver(engine) as receiver:
        trainer = threading.Thread(target=train, args=(trained, receiver.address))
        trainer.start()
        while trainer.is_alive():
            answer = engine.generate(prompt, max_new_tokens=4, do_sample=False)
            serving = "the start" if receiver.version is None else f"step {receiver.version.label}"
            print(f"from {serving}: {answer[0].tolist()}", flush=True)
            receiver.at_boundary(idle_s=0.1)  # a new version becomes visible here, whole, or not at all
        trainer.join()
    theirs = engine.state_dict()
    same = all(torch.equal(tensor, theirs[name]) for name, tensor in trained.state_dict().items())
    print(f"the engine holds the trainer's weights: {same}")


if __name__ == "__main__":
    main()
