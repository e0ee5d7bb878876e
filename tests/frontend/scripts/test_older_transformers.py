"""Scripts of Transformers 4 find what release 5 took away."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from script_ranks import SMALL_TRAINING

pytest.importorskip("transformers", reason="needs Transformers")

from echograph.frontend.scripts import older_transformers
from echograph.frontend.scripts.run import Script, ScriptRun, run_script
from echograph.frontend.scripts.torch_adapter import TorchAdapter
from echograph.frontend.scripts.world import World

_TOKENIZER = """
from transformers import BertTokenizerFast
open("vocab.txt", "w").write("\\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]))
tokenizer = BertTokenizerFast(vocab="vocab.txt")
"""


def _run(folder: Path, old: str, monkeypatch: pytest.MonkeyPatch) -> ScriptRun:
    monkeypatch.chdir(folder)
    path = folder / "train.py"
    path.write_text("import torch\n" + old + SMALL_TRAINING)
    return run_script(Script(path=path), World(size=1), TorchAdapter())


@pytest.mark.parametrize(
    "old",
    [
        "from transformers.utils import send_example_telemetry\nsend_example_telemetry('run_glue', 1)\n",
        "from transformers.file_utils import is_torch_tpu_available\nassert not is_torch_tpu_available()\n",
        "from transformers.activations import swish\nassert swish(torch.zeros(2)).shape == (2,)\n",
        "from transformers.models.bert.tokenization_bert_fast import BertTokenizerFast as B\nassert B\n",
        "from transformers.modeling_bert import BertConfig, BertModel\nassert BertModel\n",
        "from transformers.file_utils import torch_required\nassert torch_required(abs) is abs\n",
        "from transformers.optimization import AdamW\nassert issubclass(AdamW, torch.optim.AdamW)\n",
    ],
)
def test_names_are_as_they_were(old: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert any("transformers" in note for note in _run(tmp_path, old, monkeypatch).recorder.notes)


def test_names_are_there_where_the_package_is_made_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first lines may run twice, and make another module."""
    old = (
        "import sys, transformers\nkind = type(transformers)\n"
        "again = kind('transformers', transformers.__file__, {}, module_spec=transformers.__spec__)\n"
        "sys.modules['transformers'] = again\nfrom transformers import AdamW\n"
        "sys.modules['transformers'] = transformers\nassert issubclass(AdamW, torch.optim.AdamW)\n"
    )
    assert any("transformers.AdamW" in note for note in _run(tmp_path, old, monkeypatch).recorder.notes)


def test_tokenizers_have_their_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = _TOKENIZER + (
        "assert tokenizer.encode_plus('a', 'b')['token_type_ids'] == [0, 0, 0, 1, 1]\n"
        "padded = tokenizer.batch_encode_plus(['a b', 'b'], max_length=6, pad_to_max_length=True)\n"
        "assert [len(row) for row in padded['input_ids']] == [6, 6]\n"
        "assert len(tokenizer.encode('a', max_length=5, pad_to_max_length=True)) == 5\n"
        "tokenizer.add_special_tokens({'additional_special_tokens': ['<x>']})\n"
        "assert tokenizer.additional_special_tokens == ['<x>']\n"
        "assert len(tokenizer.additional_special_tokens_ids) == 1\n"
    )
    notes = _run(tmp_path, old, monkeypatch).recorder.notes
    assert any("PreTrainedTokenizerBase.encode_plus, which is no more" in note for note in notes)
    assert any("pad_to_max_length" in note for note in notes)


def test_models_have_their_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = (
        "from transformers import BertConfig, PreTrainedConfig, PreTrainedModel\n"
        "class Mine(PreTrainedModel):\n    config_class = BertConfig\n"
        "    def __init__(self, config):\n"
        "        super().__init__(config)\n        self.w = torch.nn.Linear(2, 2)\n"
        "model, rows = Mine(BertConfig(is_decoder=True)), torch.tensor([[1, 1, 0]])\n"
        "assert model.get_head_mask(None, 2) == [None, None] and PreTrainedConfig().is_decoder is False\n"
        "assert model.get_head_mask(torch.ones(4), 2).shape == (2, 1, 4, 1, 1)\n"
        "assert model.invert_attention_mask(rows).shape == (1, 1, 1, 3)\n"
        "causal = model.get_extended_attention_mask(rows, rows.shape)\n"
        "assert causal.shape == (1, 1, 3, 3)\n"
    )
    assert any("get_head_mask, which is no more" in n for n in _run(tmp_path, old, monkeypatch).recorder.notes)


def test_models_may_end_their_making_by_their_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = (
        "from transformers import BertConfig, PreTrainedModel\n"
        "class Mine(PreTrainedModel):\n    config_class = BertConfig\n"
        "    def __init__(self, config):\n"
        "        super().__init__(config)\n        self.w = torch.nn.Linear(2, 2)\n        self.init_weights()\n"
        "Mine(BertConfig())\n"
    )
    assert any("Mine ends its making" in note for note in _run(tmp_path, old, monkeypatch).recorder.notes)


def test_weights_are_loaded_by_the_arguments_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = (
        "from transformers import BertConfig, BertModel\n"
        "tiny = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)\n"
        "loaded = BertModel.from_pretrained(None, config=BertConfig(**tiny), state_dict={}, use_auth_token=None)\n"
        "assert isinstance(loaded, BertModel)\n"
    )
    assert any("takes no use_auth_token" in note for note in _run(tmp_path, old, monkeypatch).recorder.notes)


def test_overrides_are_given_what_they_take() -> None:
    class Trainer:
        def compute_loss(
            self, model: int, inputs: int, return_outputs: bool = False, count: int | None = None
        ) -> int:
            raise AssertionError(model, inputs, return_outputs, count)

    class Mine:
        def compute_loss(self, model: int, inputs: int, return_outputs: bool = False) -> int:
            return model + inputs

    notes: list[str] = []
    call = older_transformers._fewer(Mine.compute_loss, Trainer.compute_loss, notes.append)
    assert call(Mine(), 1, 2) == 3 and not notes
    assert call(Mine(), 1, 2, count=4) == call(Mine(), 1, 2, False, 4) == 3 and len(notes) == 2
    assert older_transformers._fewer(Trainer.compute_loss, Trainer.compute_loss, notes.append) is None


def test_arguments_are_read_by_their_old_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = (
        "from transformers.training_args import TrainingArguments\n"
        "class Given(TrainingArguments):\n"
        "    def __init__(self):\n"
        "        self.use_cpu, self.eval_strategy, self.train_sampling_strategy = True, 'no', 'random'\n"
        "assert Given().no_cuda and Given().evaluation_strategy == 'no' and not Given().group_by_length\n"
        "assert Given().overwrite_output_dir and Given().fp16_backend is None\n"
    )
    assert any("TrainingArguments.no_cuda" in note for note in _run(tmp_path, old, monkeypatch).recorder.notes)


def test_arguments_of_a_file_have_the_names_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = (
        "import dataclasses\nfrom transformers import HfArgumentParser\n"
        "@dataclasses.dataclass\nclass TrainingArguments:\n    eval_strategy: str = 'no'\n"
        "    bf16: bool | None = None\n"
        "given = {'evaluation_strategy': 'steps', 'overwrite_output_dir': True}\n"
        "assert HfArgumentParser(TrainingArguments).parse_dict(given)[0].eval_strategy == 'steps'\n"
        "read = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses\n"
        "assert read(['--bf16', '--eval_strategy', 'no'])[0].bf16 is True and read([])[0].bf16 is None\n"
        "from transformers.file_utils import add_code_sample_docstrings\n"
        "assert add_code_sample_docstrings(tokenizer_class='T', checkpoint='x')(abs) is abs\n"
        "from huggingface_hub.utils import get_token_to_send\nassert get_token_to_send(True) is None\n"
    )
    notes = _run(tmp_path, old, monkeypatch).recorder.notes
    assert any("no argument overwrite_output_dir" in note for note in notes)


def test_arguments_that_are_said_by_others() -> None:
    notes: list[str] = []
    given = {"group_by_length": True, "fsdp_transformer_layer_cls_to_wrap": "Block", "adafactor": False, "lr": 1}
    older_transformers.said_otherwise(given, {"lr": 0}, notes.append)
    wrap = {"transformer_layer_cls_to_wrap": ["Block"]}
    assert (
        given == {"train_sampling_strategy": "group_by_length", "fsdp_config": wrap, "lr": 1} and len(notes) == 2
    )


def test_a_chat_is_its_tokens_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Release 4 gave them alone, release 5 by their name among others."""
    old = _TOKENIZER + (
        "tokenizer.chat_template = '{% for m in messages %}{{ m[\"content\"] }} {% endfor %}'\n"
        "chat = tokenizer.apply_chat_template([{'role': 'user', 'content': 'a b'}])\n"
        "known = [0]\nknown += chat\n"
        "assert known == [0, *chat['input_ids']] == [0] + chat and chat[:1] == known[1:2]\n"
        "chat.append(9)\nassert chat.pop() == 9 and chat.input_ids == known[1:]\n"
        "assert len(chat) == len(known) - 1 and 'attention_mask' in dict(**chat) and 'input_ids' in chat\n"
    )
    notes = _run(tmp_path, old, monkeypatch).recorder.notes
    assert any("apply_chat_template" in note for note in notes)


_TRL = """import dataclasses
from transformers import TrainingArguments

@dataclasses.dataclass
class {kind}Config(TrainingArguments):
    max_length: int = 8
    beta: float = 0.1

    def __post_init__(self): pass
"""
_TRAINER = """from .{name}_config import {kind}Config

class {kind}Trainer:
    def __init__(self, model=None, args=None, processing_class=None):
        self.args, self.processing_class = args, processing_class
"""


def test_trainers_of_trl_take_what_their_settings_say_by_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a release before took is handed on; settings derived from the trainer's take its older names."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "trl"]:
        monkeypatch.delitem(sys.modules, name)
    folder = tmp_path / "packages/trl/trainer"
    folder.mkdir(parents=True)
    for init in (folder.parent / "__init__.py", folder / "__init__.py"):
        init.touch()
    for name, kind in (("dpo", "DPO"), ("sft", "SFT")):
        (folder / f"{name}_config.py").write_text(_TRL.format(kind=kind))
        (folder / f"{name}_trainer.py").write_text(_TRAINER.format(kind=kind, name=name))
    monkeypatch.syspath_prepend(tmp_path / "packages")
    old = """from transformers import TrainingArguments
from trl.trainer.sft_trainer import SFTTrainer, SFTConfig
from trl.trainer.dpo_trainer import DPOTrainer, DPOConfig
class Plain(TrainingArguments):
    def __post_init__(self): pass
plain = Plain("out", warmup_ratio=0.2)
one = SFTTrainer(args=plain, tokenizer=1, max_seq_length=4, chars_per_token=3.6)
assert isinstance(one.args, SFTConfig) and (one.args.max_length, one.args.warmup_steps) == (4, 0.2)
assert one.processing_class == 1
assert SFTConfig("out", max_seq_length=6, warmup_ratio=0.1, overwrite_output_dir=True).warmup_steps == 0.1
two = DPOTrainer(args=DPOConfig("out", max_prompt_length=4), beta=0.5, max_prompt_length=3)
assert two.args.beta == 0.5 and DPOTrainer(args=plain).args is plain
"""
    notes = _run(tmp_path, old, monkeypatch).recorder.notes
    for said in ("DPOTrainer takes no beta, max_prompt_length", "SFTTrainer takes no max_seq_length"):
        assert any(said in note for note in notes), notes
