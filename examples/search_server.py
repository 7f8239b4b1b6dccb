"""Serve passages to NQ Search: an exact FAISS index of E5 embeddings, with Search-R1's protocol.

Paper: appendix D, "NQ Search". The corpus is JSON lines, {"contents": "Title\\ntext"}. The first
start encodes it and writes the index.

    pip install -e '.[search]'
    python examples/search_server.py wiki.jsonl wiki.faiss

    POST /retrieve  {"queries": ["who wrote ..."], "topk": 3}
    200             {"result": [[{"document": {"contents": "Title\\ntext"}, "score": 0.8}, ...]]}

A run whose server fails ends with one sentence. Once the server is back, --resume goes on. The 21
million passages of Search-R1's Wikipedia need 64 GB of memory, and 20 GB for their text.
"""

import argparse
import json
import os

import faiss
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from sentence_transformers import SentenceTransformer

PROMPTS = {"query": "query: ", "document": "passage: "}  # E5 was trained with them

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("corpus")
parser.add_argument("index")
parser.add_argument("--model", default="intfloat/e5-base-v2")
parser.add_argument("--port", type=int, default=8000)
args = parser.parse_args()

with open(args.corpus, encoding="utf-8") as file:
    passages = [json.loads(line)["contents"] for line in file]
model = SentenceTransformer(args.model, prompts=PROMPTS)

if not os.path.exists(args.index):
    vectors = model.encode_document(passages, normalize_embeddings=True)
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    faiss.write_index(index, args.index)
index = faiss.read_index(args.index)
if index.ntotal != len(passages):
    parser.error(f"{args.index} has {index.ntotal} passages, {args.corpus} has {len(passages)}")

app = FastAPI()


class Request(BaseModel):
    queries: list[str]
    topk: int


@app.post("/retrieve")
def retrieve(request: Request) -> dict:
    """Return the best passages of each query, with their cosines."""
    vectors = model.encode_query(request.queries, normalize_embeddings=True)
    result = []
    for scores, positions in zip(*index.search(vectors, request.topk)):
        # Behind the passages that the index found, it says -1.
        hits = [hit for hit in zip(scores.tolist(), positions) if hit[1] >= 0]
        result.append([{"document": {"contents": passages[k]}, "score": x} for x, k in hits])
    return {"result": result}


uvicorn.run(app, port=args.port)
