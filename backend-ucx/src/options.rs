//! Defines the options of a fabric.

use std::time::Duration;

use crate::error::Error;

/// The options of a fabric, such as its network devices.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Options {
    /// The network devices that UCX may use, such as `eth0` or `mlx5_0:1`. If there are none, UCX
    /// chooses, or the variable `UCX_NET_DEVICES` says it.
    pub devices: Vec<String>,
    /// The transports that UCX may use, such as `tcp`. If there are none, UCX chooses, or the
    /// variable `UCX_TLS` says it.
    pub transports: Vec<String>,
    /// How long an engine without work polls before it sleeps. By default, the engine learns it
    /// from how long its waits take.
    pub spin: Option<Duration>,
    /// The largest number of ops that an engine queues, at least 1; 4096 by default.
    pub queue_ops: usize,
    /// The number of bytes of the largest message, at least 1; a longer copy is several messages.
    /// 1 MiB by default.
    pub message_bytes_max: u64,
    /// The largest number of messages that are on their way from an engine to one peer, at least
    /// 1; 8 by default. Further messages wait in the engine.
    pub messages_max: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            devices: Vec::new(),
            transports: Vec::new(),
            spin: None,
            queue_ops: 4096,
            message_bytes_max: 1 << 20,
            messages_max: 8,
        }
    }
}

impl Options {
    pub(crate) fn check(&self) -> Result<(), Error> {
        let numbers = [
            ("queue_ops", self.queue_ops as u64),
            ("message_bytes_max", self.message_bytes_max),
            ("messages_max", self.messages_max as u64),
        ];
        match numbers.into_iter().find(|(_, number)| *number == 0) {
            Some((name, _)) => {
                Err(Error::argument(format!("{name} of the options is 0, expected at least 1")))
            }
            None => Ok(()),
        }
    }

    /// Returns which devices and transports the options or the environment ask for.
    pub(crate) fn describe(&self) -> String {
        let wanted = |what: &str, values: &[String], variable: &str| {
            let set = std::env::var(variable).ok().map(|value| format!("{variable}={value}"));
            let named = || format!("the {what} {}", values.join(", "));
            if values.is_empty() { set } else { Some(named()) }
        };
        let devices = wanted("devices", &self.devices, "UCX_NET_DEVICES");
        let transports = wanted("transports", &self.transports, "UCX_TLS");
        let parts: Vec<_> = devices.into_iter().chain(transports).collect();
        if parts.is_empty() { "any device".to_owned() } else { parts.join(" with ") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_asked_for_is_described() {
        let (devices, transports) = (vec!["eth0".to_owned()], vec!["tcp".to_owned()]);
        let options = Options { devices, transports, ..Options::default() };
        assert_eq!(options.describe(), "the devices eth0 with the transports tcp");
    }

    #[test]
    fn a_limit_of_zero_is_refused() {
        let options = Options { messages_max: 0, ..Options::default() };
        let text = options.check().unwrap_err().to_string();
        assert_eq!(text, "messages_max of the options is 0, expected at least 1");
    }
}
