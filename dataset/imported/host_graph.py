from stepsight.dataset.imported.rank_graph import RankGraph


def host_graph(events, rank, world_size, placement) -> RankGraph:
    raise NotImplementedError
