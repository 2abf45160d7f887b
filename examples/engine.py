"""Two requests that arrive at different times share the engine's steps, and their texts come as they are made.

    python examples/engine.py [MODEL_FOLDER]

Without a folder it takes the demo model, which the first run downloads and converts.
"""

import sys

import jaxengine as je
from jaxengine.demo import demo_model_folder
from jaxengine.text import StreamDecoder, Tokenizer

GREEDY = je.RequestOptions(sampling=je.SamplingParams(temperature=0.0))


def main(folder: str | None = None) -> None:
    model = je.load_model(folder or demo_model_folder())
    tokenizer = Tokenizer.from_folder(model.path)
    arrivals = {0: "The capital of France is", 4: "One, two, three,"}  # step: prompt
    streams: dict[int, StreamDecoder] = {}

    with je.Engine(model, je.EngineConfig(max_batch_size=2, num_blocks=64)) as engine:
        step = 0
        requests = []  # a request lives as long as somebody holds its handle
        while arrivals or engine.has_pending_requests():
            if step in arrivals:
                request = engine.create_request(GREEDY)
                request.begin_turn(
                    tokenizer.encode(arrivals.pop(step)), je.TurnOptions(max_generated_tokens=8)
                )
                streams[request.id] = StreamDecoder(tokenizer)
                requests.append(request)
            # At most one step. An empty list is no end: a long prompt takes several steps before its first token.
            for event in engine.run(max_events=8):
                if event.request is None:
                    raise RuntimeError(event.detail)
                stream = streams[event.request.id]
                if je.EngineEventFlags.TOKEN in event.flags:
                    print(f"step {step}: request {event.request.id} {stream.push(event.token)!r}")
                if je.EngineEventFlags.TURN_FINISHED in event.flags:
                    reason, usage = event.finish_reason.name, event.usage
                    print(
                        f"step {step}: request {event.request.id} {stream.flush()!r}, ended by {reason}, {usage}"
                    )
                    event.request.close()  # gives its blocks and its row to others
            step += 1


if __name__ == "__main__":
    main(*sys.argv[1:])
