package main

import (
	"archive/tar"
	"archive/zip"
	"compress/gzip"
	"errors"
	"io"
	"slices"
	"strings"
	"time"
)

// file is a file in an archive.
type file struct {
	name string // with slashes
	mode uint32
	data []byte
}

func sorted(files []file) []file {
	return slices.SortedFunc(slices.Values(files), func(a, b file) int { return strings.Compare(a.name, b.name) })
}

// writeTar writes the files, in a folder, as a compressed tar archive. Each
// belongs to root and has the same time.
func writeTar(to io.Writer, folder string, files []file, at time.Time) error {
	compressed, err := gzip.NewWriterLevel(to, gzip.BestCompression)
	if err != nil {
		return err
	}
	archive := tar.NewWriter(compressed)
	for _, f := range sorted(files) {
		header := &tar.Header{Typeflag: tar.TypeReg, Name: folder + "/" + f.name, Mode: int64(f.mode),
			Size: int64(len(f.data)), ModTime: at}
		if err := archive.WriteHeader(header); err != nil {
			return err
		}
		if _, err := archive.Write(f.data); err != nil {
			return err
		}
	}
	return errors.Join(archive.Close(), compressed.Close())
}

// writeZip writes the files, in a folder, as a zip archive.
func writeZip(to io.Writer, folder string, files []file, at time.Time) error {
	archive := zip.NewWriter(to)
	for _, f := range sorted(files) {
		w, err := archive.CreateHeader(&zip.FileHeader{
			Name: folder + "/" + f.name, Method: zip.Deflate, Modified: at.UTC(),
		})
		if err != nil {
			return err
		}
		if _, err := w.Write(f.data); err != nil {
			return err
		}
	}
	return archive.Close()
}
