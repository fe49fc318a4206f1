"""Weights: a unit's values, at rest and present.

memory       the storage a unit has for life        live         a unit while the model lives
gather       parts into a unit's full layout        arrival      how a full layout comes, and leaves
lowering     cast before it is gathered             secondary    a second copy among near ranks (hpZ)
values       by element, where they rest            state_dict   whole in, whole out
residency    present, on its way, or home           resting      a parameter that nobody holds says so
touch        calls that need values                 external     used outside their own module
gathered     whole values, for a while              present      all units at once, for generation
attributes   what a partitioned parameter shows          updating     of units that stay, after a step
"""
