"""Serve a FAISS index of passages over HTTP with Search-R1's protocol.

Paper: appendix D, "NQ Search". It needs the packages of `pip install .[search]`. The first start
builds the index:

    python -m envs.search_server --corpus wiki.jsonl --index wiki.faiss \
        --encoder intfloat/e5-base-v2 --prefixes e5

The protocol is one kind of request. Without scores, the documents alone are in the result:

    POST /retrieve  {"queries": ["who wrote ..."], "topk": 3, "return_scores": true}
    200             {"result": [[{"document": {"contents": "Title\\ntext"}, "score": 0.8}, ...]]}

A training run whose server fails ends with one sentence. Once the server is back, --resume goes on.
The 21 million passages of Search-R1's Wikipedia need 64 GB of memory, and 20 GB for their text.
"""

import argparse
import os

import faiss
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel, Field
from starlette.middleware.body_limit import RequestBodyLimitMiddleware

from envs.search import (
    MAX_BYTES,
    Encoder,
    LocalEncoder,
    Retriever,
    TransformerEncoder,
    build_index,
    read_corpus,
)

TOPK = 3  # if a request does not say


class Request(BaseModel):
    queries: list[str] = Field(max_length=4096)
    topk: int | None = Field(None, ge=0, le=10)
    return_scores: bool = False


def application(retriever: Retriever) -> FastAPI:
    """Return the web application that searches with a retriever."""
    app = FastAPI()
    app.add_middleware(RequestBodyLimitMiddleware, max_body_size=MAX_BYTES)

    @app.post("/retrieve")
    def answer(request: Request) -> dict[str, list]:
        if not request.queries:
            return {"result": []}

        result: list[list] = []
        found = retriever.search(request.queries, request.topk or TOPK)
        for texts, scores in zip(*found):
            documents = [{"contents": text} for text in texts]
            scored = [{"document": text, "score": score} for text, score in zip(documents, scores)]
            result.append(scored if request.return_scores else documents)
        return {"result": result}

    return app


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the arguments of a command line."""
    parser = argparse.ArgumentParser("envs.search_server")
    add = parser.add_argument
    add("--corpus", required=True, help='JSON lines: {"contents": "Title\\ntext"}')
    add("--index", required=True, help="FAISS index, built and written if there is no such file")
    add("--encoder", default="local", help="local, or the hub id or folder of a transformer")
    add("--prefixes", choices=("e5", "none"), help="E5's, or those of the model's files alone")
    add("--host", default="127.0.0.1", help="address to listen on; there is no authentication")
    add("--port", type=int, default=8000, help="0: any free one")
    args = parser.parse_args(argv)
    if args.encoder != "local" and not args.prefixes:
        parser.error("--prefixes must be given with a transformer as --encoder")
    return args


def main(argv: list[str] | None = None) -> None:
    """Serve an index. Raises an error if a file or a model cannot be used."""
    args = parse(argv)
    corpus = read_corpus(args.corpus)
    if not any(corpus):
        raise SystemExit(f"--corpus is {args.corpus}, but must have a passage")
    encoder: Encoder
    if args.encoder == "local":
        encoder = LocalEncoder(corpus)
    else:
        encoder = TransformerEncoder(args.encoder, args.prefixes == "e5")

    if not os.path.exists(args.index):
        new = f"{args.index}.unfinished"
        # A folder that cannot be written is refused before hours of encoding.
        open(new, "wb").close()
        faiss.write_index(build_index(corpus, encoder), new)
        os.replace(new, args.index)
    app = application(Retriever(corpus, encoder, faiss.read_index(args.index)))
    uvicorn.run(app, host=args.host, port=args.port, access_log=False)


if __name__ == "__main__":
    main()
