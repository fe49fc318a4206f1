"""Units: how parameters, their gradients and their states lie, in elements.

Files in order: each imports only files before it.

    registry        map from a Parameter to the object that keeps its values
    written         what a master becomes when the user has written its weight
    compute         the dtype of products, apart from that at rest
    quantised       blocks of 8-bit or 4-bit codes with one scale each
    leaf            modules whose parameters form one unit
    experts         rows of fused experts that tokens use
    gradient_state  what the home of a parameter's gradient holds
    unit            how the parameters of a unit lie in memory
    state_layout    where the parts of a tile's states lie
"""
