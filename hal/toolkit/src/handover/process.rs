//! The name of a process.

use std::sync::OnceLock;

/// Names a process; random, so that a recycled process id is no danger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProcessToken(pub [u8; 16]);

impl ProcessToken {
    /// This process's token.
    ///
    /// # Panics
    /// If the kernel has no random numbers, which it has once it has booted.
    pub fn own() -> Self {
        static TOKEN: OnceLock<ProcessToken> = OnceLock::new();
        *TOKEN.get_or_init(|| {
            let mut token = [0; 16];
            let filled = rustix::rand::getrandom(&mut token, rustix::rand::GetRandomFlags::empty());
            assert_eq!(filled, Ok(token.len()), "the kernel has random numbers once it has booted");
            Self(token)
        })
    }

    /// The abstract socket at which the process hands out memory.
    pub(super) fn socket_name(self) -> String {
        let hex = self.0.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        format!("peerlane-{hex}")
    }
}
