"""The policies that come with the router: one small file each, listed in `router.scheduling.table`."""
