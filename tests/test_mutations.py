"""Break each promise on purpose, and see a test fail.

Each mutant is a copy of the package with one small textual change.  The tests named beside it must pass on the
unchanged copy and fail on the mutant, in an assertion: a test that nothing can break is not worth running.  The text
to change must occur exactly once, so that a mutant can't quietly turn into the original when the code moves on.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import t5fx
import t5fx.kernels
import t5fx.passes

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parent
_SKIP = shutil.ignore_patterns("__pycache__")


@dataclass(frozen=True)
class Mutant:
    """Where the package says ``old`` it says ``new``; ``killers`` are the tests that must notice."""

    old: str
    new: str
    killers: tuple[str, ...]


OPS_MASKED = "test_ops.py::test_a_masked_padded_batch_is_the_unpadded_one[False-swiglu-dot]"
STEP = "test_inner.py::test_the_step_is_the_gradient_of_the_loss"
MASKS = "test_report.py::test_masks_are_told_apart"
LATER = "test_rewrite.py::test_a_mask_that_turns_up_later_is_refused_unless_it_is_key_padding"
WHOLE = "test_rewrite.py::test_a_converted_model_is_the_reference_with_a_class_token_and_a_grid_that_is_not_square"
PADDED = "test_rewrite.py::test_a_key_padding_mask_reaches_every_part"
GRID = "test_rewrite.py::test_the_grid_is_that_of_this_call"
STALE = "test_rewrite.py::test_a_grid_that_the_tokens_do_not_have_is_an_error_and_never_used"
SCALE = "test_rewrite.py::test_the_softmax_scale_becomes_that_of_the_inner_loss"
CALLS = "test_rewrite.py::test_the_calls_of_one_owner_are_told_apart_and_so_are_train_and_eval"
SHARED = "test_rewrite.py::test_heads_that_share_keys_are_shared_in_order"
CAUSAL = "test_rewrite.py::test_attention_that_turns_causal_later_is_refused"
REVERT = "test_rewrite.py::test_revert_leaves_nothing_behind"
KEY_NORM = "test_ops.py::test_key_norm_standardises_over_the_tokens"

MUTANTS = {
    # The mask, in the mathematics.
    "key norm ignores the mask": Mutant(
        "        if mask is None:\n            var, mean", "        if True:\n            var, mean",
        (OPS_MASKED,),
    ),
    "convolution ignores the mask": Mutant(
        "            x = zero_masked(x, mask)\n        middle", "        middle", (OPS_MASKED,)
    ),
    "inner step sees masked tokens": Mutant(
        "    return x if mask is None else x.masked_fill(~mask[:, None, :, None], 0)", "    return x",
        (f"{STEP}[SwiGLU-dot-True]",),
    ),
    "inner step counts masked tokens": Mutant(
        "    return x.shape[2] if mask is None else mask.sum(-1).clamp(min=1).to(x.dtype)",
        "    return x.shape[2]", (f"{STEP}[MLP-mse-True]",),
    ),
    # The mask, in the compiler.
    "float mask accepted": Mutant(
        '    if mask.dtype != torch.bool:\n        return "float"\n', "", (f"{MASKS}[options1-mask1-float-mask]",)
    ),
    "query mask taken for key padding": Mutant(
        "    return all(sizes[a] == 1 or strides[a] == 0 for a in axes)", "    return True",
        (f"{MASKS}[options2-mask2-query-mask]", f"{LATER}[differs between queries-True]"),
    ),
    "head mask taken for key padding": Mutant(
        "axes = range(1, mask.dim() - 1) if", "axes = range(2, mask.dim() - 1) if",
        (f"{MASKS}[options3-mask3-query-mask]", f"{LATER}[differs between heads-True]"),
    ),
    "mask not checked at run time": Mutant(
        "mask.dtype != torch.bool or not _same_for_queries(mask):", "False:",
        (f"{LATER}[differs between queries-True]",),
    ),
    "key-padding mask dropped": Mutant(
        "        mask = None\n        if call.attn_mask",
        "        mask = None\n        if False and call.attn_mask", (f"{PADDED}[T5]",)
    ),
    "mask kept from the queries": Mutant(
        "mask if self_attention else None", "None", (f"{PADDED}[T5]",)
    ),
    "causal attention accepted": Mutant(
        '    if kind == "causal":', "    if False:", (f"{MASKS}[options0-None-causal]", CAUSAL)
    ),
    # The key norm.
    "key norm does nothing": Mutant(
        "        return (centred * torch.rsqrt(var + eps)).to(key.dtype)", "        return key", (KEY_NORM,)
    ),
    "key norm has no eps": Mutant(
        "torch.rsqrt(var + eps)", "torch.rsqrt(var)", (KEY_NORM,)
    ),
    "key norm left out of the graph": Mutant(
        "        if config.key_norm:", "        if False:", (f"{WHOLE}[T5]",)
    ),
    # The gradient, term by term.
    "swiglu w1: no slope of the gate": Mutant(
        "d_hidden * up * sigmoid * (1 + gate * (1 - sigmoid))", "d_hidden * up * sigmoid",
        (f"{STEP}[SwiGLU-dot-False]",),
    ),
    "swiglu w1: no gradient": Mutant(
        "(d_hidden * up * sigmoid", "(0 * d_hidden * up * sigmoid", (f"{STEP}[SwiGLU-dot-False]",)
    ),
    "swiglu w2: no activation": Mutant(
        "key.mT @ (d_hidden * act)", "key.mT @ d_hidden", (f"{STEP}[SwiGLU-dot-False]",)
    ),
    "swiglu w3: no gradient": Mutant(
        '"w3": hidden.mT @ error', '"w3": 0 * (hidden.mT @ error)', (f"{STEP}[SwiGLU-dot-False]",)
    ),
    "mlp w1: no slope of the activation": Mutant(
        "(error @ w2.mT) * sigmoid * (1 + before * (1 - sigmoid))", "(error @ w2.mT) * sigmoid",
        (f"{STEP}[MLP-dot-False]",),
    ),
    "mlp w2: no gradient": Mutant(
        '"w2": hidden.mT @ error', '"w2": 0 * (hidden.mT @ error)', (f"{STEP}[MLP-dot-False]",)
    ),
    "mse: no prediction": Mutant(
        '-value if loss == "dot" else predict() - value', "-value", (f"{STEP}[SwiGLU-mse-False]",)
    ),
    "inner learning rate ignored": Mutant(
        "        step: tuple = (key, value, weights, inner, config.loss, scale, config.inner_lr, mask)",
        "        step: tuple = (key, value, weights, inner, config.loss, scale, 1.0, mask)", (f"{WHOLE}[numbers]",)
    ),
    "learned rate left out": Mutant(
        "        if config.learn_inner_lr:  # a parameter in place of the number", "        if False:",
        (f"{WHOLE}[learned rate]",)
    ),
    # The grid.
    "grid transposed at run time": Mutant(
        "        return prefix, list(grid)", "        return prefix, list(grid)[::-1]", (f"{GRID}[False]",)
    ),
    "grid source read transposed": Mutant(
        "tuple(tree.shape[d] for d in self.dims)", "tuple(tree.shape[d] for d in self.dims[::-1])",
        (f"{GRID}[False]",),
    ),
    "the first grid is kept": Mutant(
        "self._by_thread[(threading.get_ident(), source)] = grid",
        "self._by_thread.setdefault((threading.get_ident(), source), grid)", (f"{GRID}[True]",),
    ),
    "stale grid accepted": Mutant(
        "        if prefix < 0 or suffix < 0 or prefix + cells + suffix != tokens:", "        if False:", (STALE,)
    ),
    "prefix tokens convolved": Mutant(
        "bias, prefix, grid, x_mask)", "bias, 0, grid, x_mask)", (f"{WHOLE}[T5]",)
    ),
    "prefix tokens convolved by the operator": Mutant(
        "        middle = x.narrow(2, prefix, cells)", "        middle = x.narrow(2, 0, cells)",
        ("test_ops.py::test_dwc_moves_the_grid_tokens_and_passes_the_others[3-grid0-conv2d]",),
    ),
    "queries and keys swap convolutions": Mutant(
        '(query, "dwc_q", mask', '(query, "dwc_k", mask', (f"{WHOLE}[T5]",)
    ),
    # The softmax scale, and heads.
    "scale dropped": Mutant(
        "        step: tuple = (key, value, weights, inner, config.loss, scale,",
        "        step: tuple = (key, value, weights, inner, config.loss, 1.0,", (f"{SCALE}[None]",),
    ),
    "the user's scale dropped": Mutant(
        "scale=float(scale) if scale is not None else", "scale=", (f"{SCALE}[0.7]",)
    ),
    "key heads repeated in another order": Mutant(
        '"repeat_interleave", (x, match.groups, 1)', '"repeat", (x, 1, match.groups, 1, 1)', (SHARED,)
    ),
    # The live module.
    "train and eval share a graph": Mutant(
        "    return spec, kinds, training", "    return spec, kinds", (f"{CALLS}[both]",)
    ),
    "attributes are not watched": Mutant(
        "            if unchanged(self, entry.attributes):", "            if True:", (CAUSAL,)
    ),
    "calls of one owner mixed up": Mutant(
        "nodes[spec.index]", "nodes[0]", (f"{CALLS}[:1]",)
    ),
    "revert leaves its hooks": Mutant(
        "if isinstance(hook, (GridRecorder, RefuseMaps))]", "if False]", (f"{REVERT}[False]",)
    ),
    "revert leaves the new parameters": Mutant(
        "        delattr(owner.get_submodule(parent), name)", "        pass", (f"{REVERT}[False]",)
    ),
    "revert leaves the class": Mutant(
        "        owner.__class__ = base_class(owner)", "        pass", (f"{REVERT}[False]",)
    ),
    # Choosing and saving.
    "refused sites are chosen": Mutant(
        "if site.convertible and selector(site)]", "if selector(site)]",
        ("test_select.py::test_a_refused_site_is_never_chosen",),
    ),
    "any base model is loaded into": Mutant(
        '    _compare(fingerprint(model), recipe["base"])\n', "",
        ("test_io_refusals.py::test_a_model_that_does_not_fit_is_refused_and_left_as_it_was[another class]",),
    ),
    "a failed load is not undone": Mutant(
        "        _undo(model)\n        if isinstance(error", "        if isinstance(error",
        ("test_io_refusals.py::test_a_folder_that_is_not_whole_is_refused_and_the_model_left_as_it_was[another shape]",),  # noqa: E501
    ),
    "new parameters learn at the inherited rate": Mutant(
        '("new", new_lr_scale)', '("new", inherited_lr_scale)',
        ("test_train.py::test_learning_rates_and_decay",),
    ),
    # The fused operator.
    "a fused site loses its mask": Mutant(
        "site.head_lr, *convs, site.mask, *numbers", "site.head_lr, *convs, None, *numbers",
        ("test_fuse.py::test_equals_the_operators[t5-masked]",),
    ),
    "operators with two masks are fused": Mutant(
        "if any(m is not mask for m in masks):", "if False:",
        ("test_fuse.py::test_what_does_not_belong_together_is_left_alone[TwoMasks-extra0-the same mask]",),
    ),
    "fast weights in another order are fused": Mutant(
        "any(x.args != (items[0].args[0], i) for i, x in enumerate(items))", "False",
        ("test_fuse.py::test_what_does_not_belong_together_is_left_alone[SwappedWeights-extra1-one inner step]",),
    ),
    "the fused backward forgets that mse looks at the prediction": Mutant(
        'if problem.loss == "mse":  # the error looks at the prediction', "if False:",
        ("test_fused_op.py::test_equals_the_four_operators[plain-swiglu-mse]",),
    ),
    "cached graphs outlive a change of the kernels": Mutant(
        'f"{choice.kernel}@{tag}" if tag else choice.kernel', "choice.kernel",
        ("test_backend.py::test_caches_warm_cold_and_when_files_change",),
    ),
    "a factor before the split into heads is forgotten": Mutant(
        "while isinstance(at, fx.Node) and name_of(at) in _MOVES:", "while False:",
        ("test_canonicalize.py::test_all_forms_are_one[scaled_before_heads]",),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """The package and its tests in one folder, importable as they are installed."""
    root = tmp_path_factory.mktemp("original")
    shutil.copytree(Path(t5fx.__file__).parent, root / "t5fx", ignore=_SKIP, dirs_exist_ok=True)
    for package in (t5fx.passes, t5fx.kernels):
        name = package.__name__.rpartition(".")[2]
        shutil.copytree(Path(package.__file__).parent, root / "t5fx" / name, ignore=_SKIP, dirs_exist_ok=True)
    shutil.copytree(TESTS, root / "tests", ignore=_SKIP)
    shutil.copy(TESTS.parent / "pyproject.toml", root)
    return root


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


def run_tests(root: Path, killers: tuple[str, ...]) -> subprocess.CompletedProcess:
    options = ("-m", "pytest", "-p", "no:cacheprovider", "--tb=short")
    return run(root, *options, *(f"tests/{killer}" for killer in killers))


def test_the_unchanged_copy_is_what_is_imported_and_passes_every_killer(original):
    root = original
    where = "import t5fx, t5fx.passes.match, t5fx.io; print(t5fx.__file__, t5fx.passes.match.__file__)"
    found = run(root, "-c", where)
    assert found.stdout.split() == [str(root / "t5fx/__init__.py"), str(root / "t5fx/passes/match.py")], found.stderr
    killers = tuple(dict.fromkeys(killer for mutant in MUTANTS.values() for killer in mutant.killers))
    result = run_tests(root, killers)
    assert result.returncode == 0, result.stdout[-3000:]
    assert f"{len(killers)} passed" in result.stdout


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_killed(name, original, tmp_path):
    mutant = MUTANTS[name]
    root = shutil.copytree(original, tmp_path / "mutant")
    places = {path: path.read_text().count(mutant.old) for path in sorted((root / "t5fx").rglob("*.py"))}
    found = [path for path, times in places.items() for _ in range(times)]
    assert len(found) == 1, f"the text to change must occur once, not in {[p.name for p in found]}: {mutant.old}"
    found[0].write_text(found[0].read_text().replace(mutant.old, mutant.new))
    result = run_tests(root, mutant.killers)
    assert result.returncode == 1, f"every killer passed, or could not be run:\n{result.stdout[-3000:]}"
    assert f"{len(mutant.killers)} failed" in result.stdout, result.stdout[-3000:]
    assert " error" not in result.stdout.splitlines()[-1]
    # It failed because a number or an outcome was wrong, not because the change broke the code.
    broken = re.search(r"^E .*\b(SyntaxError|NameError|ImportError|IndentationError)\b", result.stdout, re.MULTILINE)
    assert broken is None, result.stdout[-3000:]
