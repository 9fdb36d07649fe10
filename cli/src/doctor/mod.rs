//! Implements `peerlane doctor`, which reports what this machine has for each backend and what is
//! missing.
//!
//! | file | holds |
//! | --- | --- |
//! | `machine` | processors, memory and kernel features |
//! | `cuda` | GPUs of the CUDA backend |
//! | `rocm` | GPUs of the ROCm backend |
//! | `rdma` | NICs of the RDMA backend |
//! | `ucx` | network devices of the UCX backend |
//! | `links` | links between GPUs |

use clap::Args;
use peerlane::hal::{Error, SharedQueues};
use serde::Serialize;

use crate::error::Result;
use crate::report::{pretty_json, print};

mod cuda;
mod links;
mod machine;
mod rdma;
mod rocm;
mod ucx;

/// Show what each backend finds on this machine, what is missing and how to install it
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// Print the result as one JSON object
    #[arg(long)]
    json: bool,
}

/// The report lines about this machine, one list for each printed section.
#[derive(Debug, Serialize)]
struct Findings {
    machine: Vec<Finding>,
    backends: Vec<Finding>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    cuda: Vec<Finding>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    rocm: Vec<Finding>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    rdma: Vec<Finding>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    ucx: Vec<Finding>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let findings = Findings {
        machine: machine::inspect(),
        backends: backends(),
        cuda: cuda::inspect(),
        rocm: rocm::inspect(),
        rdma: rdma::inspect(),
        ucx: ucx::inspect(),
    };
    print(&if options.json { pretty_json(&findings)? } else { findings.text() })
}

impl Findings {
    fn text(&self) -> String {
        let vendors =
            [("cuda", &self.cuda), ("rocm", &self.rocm), ("rdma", &self.rdma), ("ucx", &self.ucx)];
        let sections = [&self.machine, &self.backends];
        let all = || sections.into_iter().chain(vendors.map(|(_, section)| section)).flatten();
        let width = all().map(|finding| finding.topic.len()).max().unwrap_or(0);
        let section = |name: &str, findings: &[Finding]| {
            let lines: String = findings.iter().map(|finding| finding.text(width)).collect();
            format!("{name}\n{lines}")
        };

        let ready = self.backends.iter().filter(|finding| finding.state == State::Ok);
        let ready: Vec<_> = ready.map(|finding| finding.topic).collect();
        let verdict = match ready.as_slice() {
            [] => "no backend is ready".to_owned(),
            names => format!("ready: {}", names.join(", ")),
        };

        let machine = section("machine", &self.machine);
        let backends = section("backends", &self.backends);
        let vendors: String = vendors
            .into_iter()
            .filter(|(_, findings)| !findings.is_empty())
            .map(|(name, findings)| section(name, findings) + "\n")
            .collect();
        format!("{machine}\n{backends}\n{vendors}{verdict}\n")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum State {
    Ok,
    Warning,
    Missing,
}

/// A printed line about one part of the machine, with advice if something is missing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    pub(super) topic: &'static str,
    pub(super) state: State,
    pub(super) found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) advice: Option<String>,
}

fn queues(SharedQueues { count, variable }: SharedQueues) -> Finding {
    let set = if std::env::var_os(variable).is_some() { "set" } else { "not set" };
    let text = format!(
        "{count} hardware queues for the streams of a process ({variable} is {set}): as many starts can wait at once in \
         different orders on the ranks"
    );
    Finding::ok("streams", text)
}

impl Finding {
    pub(super) fn ok(topic: &'static str, found: impl Into<String>) -> Self {
        Self { topic, state: State::Ok, found: found.into(), advice: None }
    }

    pub(super) fn warning(
        topic: &'static str,
        found: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        let (found, advice) = (found.into(), Some(advice.into()));
        Self { topic, state: State::Warning, found, advice }
    }

    pub(super) fn missing(
        topic: &'static str,
        found: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        let (found, advice) = (found.into(), Some(advice.into()));
        Self { topic, state: State::Missing, found, advice }
    }

    /// Formats a report line with its topic padded to `width`, followed by a line of advice.
    pub(super) fn text(&self, width: usize) -> String {
        let mark = match self.state {
            State::Ok => "ok",
            State::Warning => "--",
            State::Missing => "no",
        };
        let Self { topic, found, .. } = self;
        let line = format!("  {mark}  {topic:width$}  {found}\n");
        let Some(advice) = &self.advice else { return line };
        format!("{line}      {:width$}  → {advice}\n", "")
    }
}

/// Returns one report line for each backend, with the devices that the backend discovers.
fn backends() -> Vec<Finding> {
    macro_rules! finding {
        ($backend:ident, $advice:literal) => {{
            let devices = peerlane::$backend::discover();
            let names = devices.map(|devices| {
                let mut names: Vec<_> = devices.into_iter().map(|it| it.name).collect();
                // UCX lists a device once for each of its transports.
                names.dedup();
                names
            });
            backend(stringify!($backend), names, $advice)
        }};
    }
    vec![
        finding!(host, "mount /proc"),
        finding!(cuda, "install the NVIDIA driver, which contains libcuda.so.1"),
        finding!(rocm, "install ROCm, which contains libamdhip64.so and libhsa-runtime64.so.1"),
        finding!(
            rdma,
            "install the package libibverbs1 or rdma-core, which contains libibverbs.so.1; a NIC is \
             needed as well"
        ),
        finding!(
            ucx,
            "install the package libucx0 (Debian, Ubuntu) or ucx (Fedora, RHEL), which contains \
             libucp.so.0"
        ),
    ]
}

fn backend(
    backend: &'static str,
    discovered: std::result::Result<Vec<String>, impl Error>,
    advice: &str,
) -> Finding {
    match discovered {
        Err(error) => Finding::missing(backend, error.to_string(), advice),
        Ok(names) if names.is_empty() => Finding::missing(backend, "no device", advice),
        Ok(names) => {
            let (count, plural) = (names.len(), if names.len() == 1 { "" } else { "s" });
            Finding::ok(backend, format!("{count} device{plural}: {}", names.join(", ")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_are_lines_with_advice_below() {
        let findings = Findings {
            machine: vec![Finding::ok("memory", "23.4 GiB, 22.1 GiB available")],
            backends: vec![
                Finding::ok("host", "1 device: a processor"),
                Finding::missing("cuda", "libcuda.so.1 cannot be loaded", "install the driver"),
            ],
            cuda: vec![],
            rocm: vec![],
            rdma: vec![],
            ucx: vec![],
        };
        insta::assert_snapshot!(findings.text(), @"
        machine
          ok  memory  23.4 GiB, 22.1 GiB available

        backends
          ok  host    1 device: a processor
          no  cuda    libcuda.so.1 cannot be loaded
                      → install the driver

        ready: host
        ");
        let json = serde_json::to_string(&findings.backends[1]).unwrap();
        insta::assert_snapshot!(json, @r#"{"topic":"cuda","state":"missing","found":"libcuda.so.1 cannot be loaded","advice":"install the driver"}"#);
    }

    #[test]
    fn this_machine_is_looked_at_without_a_failure() {
        let topics: Vec<_> = machine::inspect().iter().map(|finding| finding.topic).collect();
        insta::assert_snapshot!(topics.join(", "), @"kernel, processors, memory, sealed memory, abstract sockets, huge pages, locked memory, open files");
        let backends: Vec<_> = backends().iter().map(|finding| finding.topic).collect();
        assert_eq!(backends, ["host", "cuda", "rocm", "rdma", "ucx"]);
    }
}
