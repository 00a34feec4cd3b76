"""Published scores of offline algorithms on D4RL's datasets, for the reader of a comparison.

Normalised scores (0 random, 100 expert) of the last checkpoint, mean over four training seeds, from
the README of CORL (Tarasov et al. 2022, https://github.com/corl-team/CORL). They were measured with
D4RL's own files and environments, so they stand only beside a dataset of exactly that name.
"""

CORL = """
dataset                          BC  10%BC TD3+BC   AWAC    CQL    IQL ReBRAC  SAC-N   EDAC     DT
halfcheetah-medium-v2         42.40  42.46  48.10  50.02  47.04  48.31  64.04  68.20  67.70  42.20
halfcheetah-medium-replay-v2  35.66  23.59  44.84  45.13  45.04  44.46  51.18  60.70  62.06  38.91
halfcheetah-medium-expert-v2  55.95  90.10  90.78  95.00  95.63  94.74 103.80  98.96 104.76  91.55
hopper-medium-v2              53.51  55.48  60.37  63.02  59.08  67.53 102.29  40.82 101.70  65.10
hopper-medium-replay-v2       29.81  70.42  64.42  98.88  95.11  97.43  94.98 100.33  99.66  81.77
hopper-medium-expert-v2       52.30 111.16 101.17 101.90  99.26 107.42 109.45 101.31 105.19 110.44
walker2d-medium-v2            63.23  67.34  82.71  68.52  80.75  80.91  85.82  87.47  93.36  67.63
walker2d-medium-replay-v2     21.80  54.35  85.62  80.62  73.09  82.15  84.25  78.99  87.10  59.86
walker2d-medium-expert-v2     98.96 108.70 110.03 111.44 109.56 111.72 111.86 114.93 114.75 107.11
maze2d-umaze-v1                0.36  12.18  29.41  65.65  -8.90  42.11 106.87 130.59  95.26  18.08
maze2d-medium-v1               0.79  14.25  59.45  84.63  86.11  34.85 105.11  88.61  57.04  31.71
maze2d-large-v1                2.26  11.32  97.10 215.50  23.75  61.72  78.33 204.76  95.60  35.66
antmaze-umaze-v2              55.25  65.75  70.75  56.75  92.75  77.00  97.75      0      0  57.00
antmaze-umaze-diverse-v2      47.25  44.00  44.75  54.75  37.25  54.25  83.50      0      0  51.75
antmaze-medium-play-v2            0   2.00   0.25      0  65.75  65.75  89.50      0      0      0
antmaze-medium-diverse-v2      0.75   5.75   0.25      0  67.25  73.75  83.50      0      0      0
antmaze-large-play-v2             0      0      0      0  20.75  42.00  52.25      0      0      0
antmaze-large-diverse-v2          0   0.75      0      0  20.50  30.25  64.00      0      0      0
pen-human-v1                   71.0   27.0   -3.9   76.7   13.7   78.5  103.2    6.9    5.1   67.7
pen-cloned-v1                  51.9   46.7    5.1   85.7    1.0   83.4  102.8   31.4   12.0   64.4
pen-expert-v1                 109.7  115.0  122.5  159.9   -1.4  128.1  152.2   87.1   -1.6  116.4
door-human-v1                   2.3   -0.1   -0.3    2.4    5.5    3.3   -0.1   -0.4   -0.1    4.4
door-cloned-v1                 -0.1    0.3   -0.3    0.0   -0.3    3.1    0.1   -0.3    2.7    7.6
door-expert-v1                105.4  104.0   -0.3  104.6   -0.3  106.7  106.4   -0.3  106.3  104.9
hammer-human-v1                 3.0   -0.2    1.0    1.0    0.1    1.8    0.2    0.2    0.3    1.3
hammer-cloned-v1                0.6    0.1    0.3    1.3    0.3    1.5    5.0    0.1    0.2    1.8
hammer-expert-v1              126.8  121.8    3.1  127.1    0.3  128.7  133.6   25.1   28.5  117.5
relocate-human-v1               0.0   -0.1   -0.3    0.5    0.1    0.1    0.2   -0.3   -0.2    0.1
relocate-cloned-v1             -0.1    0.0   -0.3    0.0   -0.3    0.0    1.7    0.0    0.2    0.2
relocate-expert-v1            107.6   97.9   -1.7  109.5   -0.3  106.1  107.5   -0.4   71.9  104.3
"""


def published_scores(dataset: str) -> dict[str, float]:
    """Algorithm -> CORL's normalised score on the D4RL dataset of this exact name; else empty.

    Example: `published_scores("hopper-medium-replay-v2")["IQL"]` is 97.43.
    """
    head, *rows = (line.split() for line in CORL.strip().splitlines())
    for name, *scores in rows:
        if name == dataset:
            return dict(zip(head[1:], map(float, scores), strict=True))
    return {}
