//! Lists the variables by which launchers tell ranks their place.

/// The variables that a group opened from the environment reads. A test machine may have set some of them.
pub const LAUNCHER_VARIABLES: [&str; 22] = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PEERLANE_HUB",
    "PEERLANE_PORT",
    "PEERLANE_JOB_ID",
    "PEERLANE_SECRET",
    "PEERLANE_SECRET_FILE",
    "PEERLANE_ALLOW_UNAUTHENTICATED",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NTASKS",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NODELIST",
    "TORCHELASTIC_USE_AGENT_STORE",
];
