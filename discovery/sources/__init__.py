"""Where do engine addresses come from?

Named ones (`static`), and sources that say again and again which engines there are, all of them each time: `file`, `dns`, `docker`,
`kubernetes`, `announced`. `finder` runs those, `sightings` makes changes of what they say.
"""
