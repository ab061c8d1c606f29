package upnp

import (
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
)

const (
	maxValues = 64   // in a SOAP answer
	maxValue  = 1024 // bytes
)

// arg is one argument of a call; their order matters to some gateways.
type arg struct{ name, value string }

// Error codes of WANIPConnection that decide what is tried next.
const (
	codeArgs           = 402 // some gateways say so where they mean a conflict
	codeFailed         = 501
	codeNotAuthorized  = 606
	codeNoSuchEntry    = 714
	codeConflict       = 718
	codeSamePorts      = 724
	codePermanentOnly  = 725
	codeNoPortsLeft    = 728
	codeConflictMech   = 729
	soapEncoding       = "http://schemas.xmlsoap.org/soap/encoding/"
	soapEnvelope       = "http://schemas.xmlsoap.org/soap/envelope/"
	contentTypeOfCalls = `text/xml; charset="utf-8"`
)

// RefusedError is a gateway's no.
type RefusedError struct {
	Code int
	Text string
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("refused by the gateway (UPnP): %s (code %d)", strings.TrimSpace(e.Text), e.Code)
}

func refusedWith(err error, codes ...int) bool {
	var r *RefusedError
	if !errors.As(err, &r) {
		return false
	}
	for _, c := range codes {
		if r.Code == c {
			return true
		}
	}
	return false
}

// encodeCall is the body of a SOAP call.
func encodeCall(service, action string, args []arg) []byte {
	var b bytes.Buffer
	b.WriteString(`<?xml version="1.0"?>` + "\r\n")
	b.WriteString(`<s:Envelope xmlns:s="` + soapEnvelope + `" s:encodingStyle="` + soapEncoding + `"><s:Body><u:` +
		action + ` xmlns:u="` + service + `">`)
	for _, a := range args {
		b.WriteString("<" + a.name + ">")
		_ = xml.EscapeText(&b, []byte(a.value))
		b.WriteString("</" + a.name + ">")
	}
	b.WriteString("</u:" + action + "></s:Body></s:Envelope>\r\n")
	return b.Bytes()
}

// decodeAnswer reads the values of a SOAP answer, or the error in it.
func decodeAnswer(b []byte) (map[string]string, error) {
	if len(b) > maxBody {
		return nil, fmt.Errorf("%w: an answer of more than %d bytes", ErrGarbled, maxBody)
	}
	d := xml.NewDecoder(bytes.NewReader(b))
	d.CharsetReader = plainCharset
	values := map[string]string{}
	var name string
	var text strings.Builder
	sawBody := false
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("%w: %v", ErrGarbled, err)
		}
		switch t := token.(type) {
		case xml.StartElement:
			name = t.Name.Local
			sawBody = sawBody || name == "Body"
			text.Reset()
		case xml.CharData:
			if text.Len()+len(t) > maxValue {
				return nil, fmt.Errorf("%w: a value of more than %d bytes", ErrGarbled, maxValue)
			}
			text.Write(t)
		case xml.EndElement:
			if name != t.Name.Local {
				continue // not a leaf
			}
			if len(values) == maxValues {
				return nil, fmt.Errorf("%w: more than %d values", ErrGarbled, maxValues)
			}
			values[name] = strings.TrimSpace(text.String())
			name = ""
		}
	}
	if !sawBody {
		return nil, fmt.Errorf("%w: no SOAP body", ErrGarbled)
	}
	if code, ok := values["errorCode"]; ok {
		n, err := strconv.Atoi(code)
		if err != nil || n == 0 {
			return nil, fmt.Errorf("%w: error code %q", ErrGarbled, code)
		}
		return nil, &RefusedError{Code: n, Text: values["errorDescription"]}
	}
	if fault, ok := values["faultstring"]; ok {
		return nil, &RefusedError{Text: fault}
	}
	return values, nil
}

// plainCharset lets descriptions pass that claim a charset in which all that matters here is ASCII anyway.
func plainCharset(_ string, in io.Reader) (io.Reader, error) { return in, nil }
