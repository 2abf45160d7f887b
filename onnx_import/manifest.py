"""What a configuration's decoder section says about the graph's names and about the state that its layers keep.

Everything here is read from the file alone; `states` compares it with the graph. A layer may own state of several
kinds, or none, and nothing follows from the model's name.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from onnx_import.sections import Section

PAGED = "paged_kv"
FIXED_KINDS = ("fixed_conv", "fixed_recurrent")
KINDS = (PAGED, *FIXED_KINDS)

_TEMPLATES: Mapping[str, tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]] = MappingProxyType(
    {
        PAGED: (
            (
                ("past_key_names", "past_key_values.%d.key"),
                ("past_value_names", "past_key_values.%d.value"),
            ),
            (("present_key_names", "present.%d.key"), ("present_value_names", "present.%d.value")),
        ),
        "fixed_conv": ((("past_conv_names", ""),), (("present_conv_names", ""),)),
        "fixed_recurrent": ((("past_recurrent_names", ""),), (("present_recurrent_names", ""),)),
    }
)
"""Each kind's template keys in `inputs` and in `outputs`, with the names that the format has for absent ones."""

_MOST_LAYERS = 10_000
"""No decoder has as many; a larger number is a mistake that would only cost memory."""
_DECODER_KEYS = frozenset(
    "session_options filename head_size hidden_size inputs outputs num_attention_heads num_hidden_layers layer_types "
    "num_key_value_heads state_groups sliding_window run_options pipeline conv_cache_size".split()
)
_WINDOW_KEYS = frozenset(
    "window_size layers slide_key_value_cache slide_inputs cache_slack pad_value alignment".split()
)

_TABLE_OFFSETS = frozenset(
    (
        "multiRotaryCacheConcatOffset",
        "multi_rotary_cache_concat_offset",
        "nv_multi_rotary_cache_concat_offset",
    )
)
"""Provider options, of WebGPU and of TensorRT RTX, that say at which row of the rotary tables the long ones begin."""


@dataclass(frozen=True)
class StateNames:
    """The name templates of a kind of state, each holding one `%d`: for `paged_kv` keys, then values."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def of_layer(self, layer: int) -> Iterator[tuple[str, str]]:
        """A layer's pairs of input and output."""
        for pair in zip(self.inputs, self.outputs, strict=True):
            yield expand(pair[0], layer), expand(pair[1], layer)


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a layer's state: the graph's input that takes it and the output that gives its successor.

    `shape` leaves out the first axis (the batch, or the blocks of a pool). None stands for an axis that the graph
    leaves open; a fixed state has none of those.
    """

    kind: str
    layer: int
    input: str
    output: str
    dtype: np.dtype
    shape: tuple[int | None, ...]


@dataclass(frozen=True)
class StateGroup:
    """One kind of per-sequence state and the layers that own it.

    `tensors` are those found in the graph, layer by layer; `derived` is true where the file has no manifest.
    """

    kind: str
    layer_ids: tuple[int, ...]
    names: StateNames
    derived: bool
    tensors: tuple[StateTensor, ...] = ()

    @property
    def dtype(self) -> np.dtype | None:
        """The element type of the first tensor, of a `paged_kv` group its first key; None where the graph has none."""
        return self.tensors[0].dtype if self.tensors else None


@dataclass(frozen=True)
class SlidingWindow:
    """Layers whose queries see the last `size` positions, themselves included.

    Where `layers` is empty, a cache that slides does so in every layer; otherwise the graph alone says what is seen.
    `slide_inputs` and `cache_slack` tell how the exporting runtime feeds and stores such layers and change no result.
    """

    size: int
    layers: tuple[int, ...]
    slide_key_value_cache: bool
    slide_inputs: bool
    cache_slack: int


@dataclass(frozen=True)
class DecoderConfig:
    """How the decoder's graph is named: its file, its inputs and outputs, and its state.

    `names` are the templates of each kind of state that the file names, `declared` its state groups, None where it
    has none.
    """

    filename: str
    num_layers: int
    input_ids: str
    position_ids: str
    attention_mask: str
    logits: str
    names: Mapping[str, StateNames]
    declared: tuple[StateGroup, ...] | None
    sliding_window: SlidingWindow | None

    @property
    def past_key(self) -> str:
        """Name template of a layer's key cache."""
        return self.names[PAGED].inputs[0]


@dataclass(frozen=True)
class DecoderManifest(DecoderConfig):
    """A decoder's names and state as found in its graph; `problems` is all that contradicts the graph."""

    state_groups: tuple[StateGroup, ...] = ()
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fixed(self) -> tuple[StateTensor, ...]:
        """Every fixed state of every layer, group by group."""
        groups = (group for group in self.state_groups if group.kind in FIXED_KINDS)
        return tuple(tensor for group in groups for tensor in group.tensors)


def expand(template: str, layer: int) -> str:
    """A layer's name; layers keep their numbers, whichever of them own state."""
    return template.replace("%d", str(layer))


def layer_pattern(template: str) -> re.Pattern[str]:
    """A pattern that matches names made from a `%d` template and captures the layer."""
    before, after = template.split("%d")
    return re.compile(re.escape(before) + r"(\d+)" + re.escape(after))


def read_decoder(decoder: Section) -> DecoderConfig:
    """Read the `model.decoder` section.

    Raises FolderError, naming file and key, for what is missing or of a wrong type, for unknown kinds of state,
    malformed templates, ids or layers that repeat, and layers that the model doesn't have.
    """
    decoder.note_unknown(_DECODER_KEYS)
    if "pipeline" in decoder.values:
        raise decoder.fail("pipeline", "splits the decoder into several graphs, which isn't supported")
    _check_rotary_tables(decoder)
    inputs, outputs = decoder.section("inputs"), decoder.section("outputs")
    num_layers = decoder.integer("num_hidden_layers", at_most=_MOST_LAYERS)
    names = _names(inputs, outputs)
    return DecoderConfig(
        filename=decoder.text("filename"),
        num_layers=num_layers,
        input_ids=inputs.text("input_ids", "input_ids"),
        position_ids=inputs.text("position_ids", "position_ids"),
        attention_mask=inputs.text("attention_mask", "attention_mask"),
        logits=outputs.text("logits", "logits"),
        names=MappingProxyType(names),
        declared=_declared(decoder, names, num_layers),
        sliding_window=_sliding_window(decoder, num_layers),
    )


def _check_rotary_tables(decoder: Section) -> None:
    """Refuse long rotary tables that lie behind the short ones where a provider's kernels choose, not the graph."""
    session = decoder.values.get("session_options")
    providers = session.get("provider_options") if isinstance(session, dict) else None
    for index, entry in enumerate(providers if isinstance(providers, list) else ()):
        for provider, options in entry.items() if isinstance(entry, dict) else ():
            for name in sorted(_TABLE_OFFSETS & options.keys()) if isinstance(options, dict) else ():
                if str(options[name]) != "0":
                    raise decoder.fail(
                        f"session_options.provider_options[{index}].{provider}.{name}",
                        f"is {options[name]!r}, for rotary tables of short and long factors in one, between which "
                        "only that provider's kernels choose; export the model for cpu or cuda",
                    )


def _names(inputs: Section, outputs: Section) -> dict[str, StateNames]:
    names = {}
    for kind, (past, present) in _TEMPLATES.items():
        if kind == PAGED or any(key in inputs.values for key, _ in past):
            names[kind] = StateNames(
                tuple(_template(inputs, key, default) for key, default in past),
                tuple(_template(outputs, key, default) for key, default in present),
            )
    return names


def _template(section: Section, key: str, default: str) -> str:
    template = section.text(key, default or None)
    if template.count("%d") != 1 or template.count("%") != 1:
        raise section.fail(key, f"should hold exactly one %d, not {template!r}")
    return template


def _declared(
    decoder: Section, names: Mapping[str, StateNames], num_layers: int
) -> tuple[StateGroup, ...] | None:
    groups = decoder.values.get("state_groups")
    if groups is None:
        return None
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise decoder.fail("state_groups", "should be a list of objects")
    sections = [decoder.child(f"state_groups[{index}]", group) for index, group in enumerate(groups)]
    owners: dict[tuple[str, int], str] = {}
    ids: list[Any] = []
    found = []
    for section in sections:
        group = _group(section, names, num_layers)
        for layer in group.layer_ids:
            owner = owners.setdefault((group.kind, layer), section.path)
            if owner != section.path:
                raise section.fail(
                    "layer_ids", f"holds layer {layer}, whose {group.kind!r} {owner} lists too"
                )
        if section.values.get("id") is not None:
            if section.values["id"] in ids:
                raise section.fail("id", f"is {section.values['id']!r}, as that of an earlier group")
            ids.append(section.values["id"])
        found.append(group)
    return tuple(found)


def _group(section: Section, names: Mapping[str, StateNames], num_layers: int) -> StateGroup:
    section.note_unknown(frozenset(("id", "kind", "layer_ids")))
    kind = section.text("kind")
    if kind not in KINDS:
        raise section.fail("kind", f"is {kind!r}, not one of {', '.join(KINDS)}")
    layer_ids = section.layer_ids("layer_ids", num_layers)
    if not layer_ids:
        raise section.fail("layer_ids", "lists no layer")
    if kind not in names:
        raise section.fail("kind", f"is {kind!r}, but {_missing_template(section, kind)} is missing")
    return StateGroup(kind, layer_ids, names[kind], derived=False)


def _missing_template(section: Section, kind: str) -> str:
    return repr(f"{section.path.rsplit('.', 1)[0]}.inputs.{_TEMPLATES[kind][0][0][0]}")


def _sliding_window(decoder: Section, num_layers: int) -> SlidingWindow | None:
    if decoder.values.get("sliding_window") is None:
        return None
    section = decoder.section("sliding_window")
    section.note_unknown(_WINDOW_KEYS)
    return SlidingWindow(
        size=section.integer("window_size"),
        layers=section.layer_ids("layers", num_layers) if "layers" in section.values else (),
        slide_key_value_cache=section.flag("slide_key_value_cache", default=True),
        slide_inputs=section.flag("slide_inputs", default=True),
        cache_slack=section.integer("cache_slack", at_least=0, default=0),
    )
