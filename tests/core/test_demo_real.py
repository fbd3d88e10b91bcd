from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_local import demo, registry

pytestmark = pytest.mark.slow


def test_the_real_demo_target_answers_in_plain_transformers() -> None:
    folder = demo.ensure()
    assert registry.locate("demo").target_dir == folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "I paid 1,234 for it's\n\n  x ** 2 日本 🎉"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert [tokenizer.decode([i]) for i in ids[2:8]] == [" ", "1", ",", "2", "3", "4"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.inference_mode():
        answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    reply = tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
    assert "Paris" in reply
    assert reply.endswith("<|im_end|>")
