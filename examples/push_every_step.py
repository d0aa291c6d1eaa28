"""Samples from the policy while it is trained: a callback pushes the adapter after every optimiser step.

`PushEveryStep` works with transformers' Trainer and with TRL's trainers, as `callbacks=[PushEveryStep(client, name)]`.
The loop below has the shape of TRL's GRPOTrainer, without its parts: sample a group of completions, reward them, take a
step in the direction of the better ones. Needs torch, transformers and peft.
Run: python examples/push_every_step.py path/to/checkpoint my-policy "The party" --steps 5
"""

import argparse
import os
from typing import Any

import torch
from motet import Client, PushedVersion
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from transformers import AutoModelForCausalLM, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

GROUP_SIZE = 4


class PushEveryStep(TrainerCallback):
    """Pushes the adapter that is trained. Requests that run keep their version, new ones get the pushed one."""

    def __init__(self, client: Client, name: str) -> None:
        self.client = client
        self.name = name
        self.pushed: PushedVersion | None = None  # the last one

    def on_step_end(
        self,
        args: TrainingArguments | None,  # noqa: ARG002 - TrainerCallback's signature, as `control`
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,
    ) -> None:
        """Called by the trainer after every optimiser step; `model` is the model that it trains."""
        model = kwargs["model"]
        if not state.is_world_process_zero:
            return
        config = model.peft_config["default"].to_dict()
        self.pushed = self.client.adapters.push(self.name, config, get_peft_model_state_dict(model))


def reward(token_ids: tuple[int, ...]) -> float:
    """How good a completion is; a task of its own. Here: many different tokens."""
    return len(set(token_ids)) / len(token_ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="checkpoint directory that the server serves")
    parser.add_argument("name", help="name of the adapter on the server")
    parser.add_argument("prompt")
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    lora = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(arguments.model), lora)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    with Client(os.environ.get("MOTET_SERVER", "127.0.0.1:50051")) as client:
        callback = PushEveryStep(client, arguments.name)
        state, control = TrainerState(is_world_process_zero=True), TrainerControl()
        callback.on_step_end(None, state, control, model=model)  # the policy before the first step
        for _ in range(arguments.steps):
            assert callback.pushed is not None and callback.pushed.adapter.active_version is not None
            stream = client.generate(
                arguments.prompt,
                adapter=arguments.name,
                n=GROUP_SIZE,
                temperature=1.0,
                max_tokens=16,
                logprobs=0,
                logprobs_mode="processed",  # of what was drawn from: what importance weights need
            )
            completions = stream.result().completions
            assert stream.started is not None
            assert stream.started.adapter_digest == callback.pushed.adapter.active_version.digest
            rewards = torch.tensor([reward(completion.token_ids) for completion in completions])
            advantages = rewards - rewards.mean()
            losses = []
            for completion, advantage in zip(completions, advantages, strict=True):
                token_ids = torch.tensor([completion.token_ids])
                losses.append(advantage * model(input_ids=token_ids, labels=token_ids).loss)
            torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]  # torch's own
            optimizer.step()
            optimizer.zero_grad()
            state.global_step += 1
            callback.on_step_end(None, state, control, model=model)
            version = callback.pushed.adapter.active_version
            assert version is not None
            print(
                f"step {state.global_step}: reward {rewards.mean():.3f}, version {version.number} "
                f"{version.digest[:12]}, visible after {1000 * callback.pushed.visible_s:.0f} ms"
            )


if __name__ == "__main__":
    main()
