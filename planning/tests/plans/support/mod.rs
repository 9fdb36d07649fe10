//! Makes plans for tests, and runs them without a group.

pub(crate) mod cases;
pub(crate) mod mutants;
pub(crate) mod oracle;
pub(crate) mod plans;
pub(crate) mod processor_time;
