"""Programs: small models and trainings, each once, and the homes where their states lie.

models                 toy models and their habits
twins                  loops, batches, and what must be equal to the bit
homes                  where weights, gradients and states lie
faces                  one program in plain PyTorch and sharded
everyday               all programs that do the same in both: towers, layers, loops, passing, adapters,
                           hugging_face
compiled               torch.compile before and after sharding
peft_adapters          adapters of the peft library, where it is installed
diffusion              models of diffusers, where it is installed
mixtures               models of transformers with fused experts
on_device              what a wait that is missing would change on a device
random_calls           random trees of modules, of which any is called
unsharded              plain PyTorch alone, for the simulated device
"""
