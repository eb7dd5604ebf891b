"""What the ways of training in parallel share; each of them uses it, none of it knows any of them.

`autograd_hooks` report when a backward begins, when each gradient is computed, and when it has
ended; `flat_buffers` hold many tensors side by side for one collective, and `grad_views` are
gradients in them. `precision` computes in fewer bits than parameters are kept in.
`shared_parameters` are one memory for all ranks of a host. `join` lets ranks run out of inputs,
`agreement` finds out whether ranks have the same tensors, `pytrees` goes through tensors in nested
arguments, `compiling` keeps torch.compile where it belongs. `memory` is where all of it allocates
memory that other ranks see.

Internal: its public names are those of `dure`.
"""
