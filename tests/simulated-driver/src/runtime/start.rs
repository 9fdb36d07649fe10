//! Reads the environment when the first API is started, once in each process.

use std::sync::OnceLock;

use super::code::{Outcome, UNKNOWN};
use crate::device::script;
use crate::device::settings::{self, PREFIX};

/// Reads the environment at the first call; later calls return the same result.
pub(crate) fn read_environment() -> Outcome {
    static READ: OnceLock<Outcome> = OnceLock::new();
    *READ.get_or_init(|| {
        let read = settings::read_environment()
            .and_then(|()| script::read(&variable(&format!("{PREFIX}FAIL")).unwrap_or_default()));
        read.map_err(|problem| {
            eprintln!("simulated driver: {problem}");
            UNKNOWN
        })
    })
}

pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|text| text.to_string_lossy().into_owned())
}
