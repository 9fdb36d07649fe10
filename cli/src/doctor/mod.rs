//! `peerlane doctor`: what this machine has for each backend, and what is missing.

use std::io::{self, Write};

use clap::Args;
use serde::Serialize;

use crate::error::{Failure, Result};

mod backends;
mod cuda;
mod finding;
mod links;
mod machine;
mod rdma;
mod rocm;

use finding::{Finding, State};

/// Show what each backend finds on this machine, what is missing, and how to get it.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Everything that was found.
#[derive(Debug, Serialize)]
struct Findings {
    machine: Vec<Finding>,
    backends: Vec<Finding>,
    /// More of the CUDA backend, where it has devices.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    cuda: Vec<Finding>,
    /// The same of the ROCm backend.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    rocm: Vec<Finding>,
    /// More of the RDMA backend, where the kernel has devices.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    rdma: Vec<Finding>,
}

/// Looks around and prints what there is.
///
/// # Errors
/// If it cannot be printed; what is missing is no failure.
pub(crate) fn run(options: &Options) -> Result<()> {
    let findings = Findings {
        machine: machine::look(),
        backends: backends::look(),
        cuda: cuda::look(),
        rocm: rocm::look(),
        rdma: rdma::look(),
    };
    let text = if options.json {
        let json = serde_json::to_string_pretty(&findings);
        json.map_err(|error| Failure::failed(error.to_string()))? + "\n"
    } else {
        findings.text()
    };
    io::stdout()
        .write_all(text.as_bytes())
        .map_err(|error| Failure::io("cannot print the findings", &error))
}

impl Findings {
    fn text(&self) -> String {
        let sections = [&self.machine, &self.backends, &self.cuda, &self.rocm, &self.rdma];
        let all = || sections.into_iter().flatten();
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
        let vendors: String = [("cuda", &self.cuda), ("rocm", &self.rocm), ("rdma", &self.rdma)]
            .into_iter()
            .filter(|(_, findings)| !findings.is_empty())
            .map(|(name, findings)| {
                section(name, findings)
                    + "
"
            })
            .collect();
        format!(
            "{machine}
{backends}
{vendors}{verdict}
"
        )
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
        let topics: Vec<_> = machine::look().iter().map(|finding| finding.topic).collect();
        insta::assert_snapshot!(topics.join(", "), @"kernel, processors, memory, sealed memory, abstract sockets, huge pages, locked memory, open files");
        let backends: Vec<_> = backends::look().iter().map(|finding| finding.topic).collect();
        assert_eq!(backends, ["host", "cuda", "rocm", "rdma"]);
    }
}
