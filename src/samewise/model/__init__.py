"""transformers' models: found by name, checked, loaded, and changed so that they run under the frame rule.

Holds: resolve, embedded, folder_cache, source and digest names, files and their digests; gguf, gguf_file and
gguf_weights the conversion of GGUF files; folder the tokenizer and other files beside the weights; refuse and
arch which models can be run and how they use attention; load, linear, activation, rope, row_pieces,
attention_binding, fused_layer, native_modules, fp8 a model's modules; views and gates layers with sublayers
left out; surgery the one module that touches a torch module's insides.
State: a loaded model belongs to its engine; weights may be shared by several engines; files in the cache
folder are written once, under a lock.
Imports: kv, kernels and the base modules.
"""
